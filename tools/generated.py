"""Generated parts of documents, each between two comments."""

from __future__ import annotations


def with_part(document: str, begin: str, end: str, part: str) -> str:
    """The document with the text between two of its lines replaced.

    Args:
        document: text of the document.
        begin: the line before the part, with its line break.
        end: the line after it, likewise.
        part: what is written between them.

    Raises:
        ValueError: the document does not have these lines, in this order.
    """
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"there is no part from {begin!r} to {end!r}")
    return before + begin + part + end + after
