"""How much work a tokenizer may make of a text, as far as its description tells.

A tokenizer is a program that came with a checkpoint. Its regular expressions are matched by
backtracking, which with some takes minutes for a page of text, and replacements that follow each
other may multiply a text beyond all memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

_MOST_GROWTH = 64
"""Times that a usual tokenizer may lengthen a text. A byte becomes up to 6 in its name."""

_ITEM = re.compile(
    r"""
    (?P<open>\((?:\?(?:[imxs-]*:|[=!]|<[=!]|>))?)  # a group, what follows, what comes before
    | (?P<close>\))
    | (?P<or>\|)
    | (?P<atom>\\[pP]\{\^?\w+\} | \\x\{[0-9A-Fa-f]+\} | \\[^1-9kgKRX]
        | [^\\()\[\]|*+?{] | \{(?!\d*,?\d*\}))
    | (?P<set>\[)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\})[?+]?")
_MANY_REPEATS = 16
"""A repetition that may be longer counts as one without a bound."""
_MOST_WAYS = 64
"""In which the parts of an alternative may match that are repeated a few times only."""


def growth(part: Any) -> float:
    """By how much a part of a tokenizer may multiply the length of a text, at the most.

    Args:
        part: of the `tokenizers` package: normalizer, decoder or post-processor; None for none.
    """
    factors: list[tuple[float, str, str | None]] = []  # of replacements: factor, new text, old
    times = 1.0
    for step in _steps(part):
        if step["type"] == "Replace":
            pattern, content = step["pattern"], step["content"]
            old = pattern.get("String")
            factor = 1.0 + len(content) if old is None else len(content) / max(len(old), 1)
            factors.append((max(factor, 1.0), content, old))
        elif step["type"] == "TemplateProcessing":
            times *= max(sum("Sequence" in piece for piece in step["single"]), 1)
    # most[i]: of a text that the replacement i is the first to change. One after it changes the
    # new text only if they have a character in common.
    most: list[float] = []
    for factor, content, _ in reversed(factors):
        later = zip(most, reversed(factors), strict=False)
        further = [by for by, (_, _, old) in later if old is None or set(old) & set(content)]
        most.append(factor * max(further, default=1.0))
    return times * max(most, default=1.0)


def is_usual(backend: Any) -> bool:
    """Whether a short text is encoded in a short time, whatever it is.

    That is so if all regular expressions are quick and the text stays about as long as it is.

    Args:
        backend: the tokenizer of the `tokenizers` package.
    """
    parts = backend.normalizer, backend.pre_tokenizer
    lengthens = growth(backend.normalizer) * growth(backend.post_processor)
    return lengthens <= _MOST_GROWTH and all(map(_is_quick_part, parts))


def decodes_usually(backend: Any) -> bool:
    """Whether tokens are decoded in a short time, whatever they are."""
    return growth(backend.decoder) <= _MOST_GROWTH and _is_quick_part(backend.decoder)


def _is_quick_part(part: Any) -> bool:
    patterns = (step.get("pattern") for step in _steps(part))
    found = (pattern.get("Regex") for pattern in patterns if isinstance(pattern, dict))
    return all(is_quick(regex) for regex in found if regex is not None)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part, of sequences within sequences too."""
    if part is not None:
        waiting = [json.loads(part.__getstate__())]
        while waiting:
            step = waiting.pop()
            if step["type"] != "Sequence":
                yield step
                continue
            inner = next(value for value in step.values() if isinstance(value, list))
            waiting.extend(reversed(inner))


def is_quick(regex: str) -> bool:
    """Whether matching takes time linear in the text at each place where it begins.

    Each alternative has two unbounded repetitions at the most, of single characters, and nothing
    after the second has to match, so that the matcher never tries all lengths of both. What
    published tokenizers split texts by is like that. Of what else there is, this does not know.
    """
    try:
        place, alternatives = _parse(regex, 0)
    except _UnknownError:
        return False
    return place == len(regex) and all(map(_is_quick_alternative, alternatives))


class _UnknownError(Exception):
    """A regular expression has what is not looked into."""


class _Item(NamedTuple):
    """A part of an alternative: what may be repeated.

    Args:
        is_unbounded: whether it may be repeated often.
        is_needed: whether it has to match.
        num_ways: in which it may match, if it is not unbounded.
    """

    is_unbounded: bool
    is_needed: bool
    num_ways: float


def _is_quick_alternative(items: Sequence[_Item]) -> bool:
    if math.prod(item.num_ways for item in items) > _MOST_WAYS:
        return False
    unbounded = [place for place, item in enumerate(items) if item.is_unbounded]
    if len(unbounded) < 2:
        return True
    return len(unbounded) == 2 and not any(item.is_needed for item in items[unbounded[1] + 1 :])


def _parse(regex: str, place: int) -> tuple[int, list[list[_Item]]]:
    """The alternatives of a regular expression or a group, from one place on; and where it ends."""
    alternatives: list[list[_Item]] = [[]]
    while place < len(regex):
        found = _ITEM.match(regex, place)
        if found is None:
            raise _UnknownError
        if found["close"]:
            break
        place, is_group, num_ways = found.end(), bool(found["open"]), 1.0
        if found["or"]:
            alternatives.append([])
            continue
        if is_group:
            place, inner = _parse(regex, place)
            if regex[place : place + 1] != ")" or any(item.is_unbounded for item in chain(*inner)):
                raise _UnknownError
            place += 1
            num_ways = sum(math.prod(item.num_ways for item in items) for items in inner)
        elif found["set"]:
            place = _end_of_set(regex, place)
        quantifier = _QUANTIFIER.match(regex, place)
        least, most = 1, 1.0
        if quantifier is not None:
            place = quantifier.end()
            least, most = _bounds(quantifier)
            if _QUANTIFIER.match(regex, place) or (is_group and most > 1):
                raise _UnknownError
        is_unbounded = most > _MANY_REPEATS
        num_ways += 0.0 if is_unbounded else most - least
        alternatives[-1].append(_Item(is_unbounded, least > 0, num_ways))
    return place, alternatives


def _bounds(quantifier: re.Match[str]) -> tuple[int, float]:
    """The least and the greatest number of repetitions."""
    sign = quantifier[0][0]
    if sign != "{":
        return int(sign == "+"), 1.0 if sign == "?" else float("inf")
    least = int(quantifier["least"] or 0)
    if not quantifier["comma"]:
        return least, float(least)
    return least, float(quantifier["most"] or "inf")


def _end_of_set(regex: str, place: int) -> int:
    """Where a set of characters ends that begins before this place; sets may be in sets."""
    depth, is_first = 1, True
    while place < len(regex):
        character = regex[place]
        place += 2 if character == "\\" else 1
        if is_first and character == "^":
            continue
        if character == "[":
            depth += 1
        elif character == "]" and not is_first:
            depth -= 1
            if not depth:
                return place
        is_first = character == "["
    raise _UnknownError
