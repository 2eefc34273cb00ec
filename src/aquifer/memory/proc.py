"""Sizes that Linux reports in files of /proc."""

from __future__ import annotations

from pathlib import Path


def proc_bytes(path: str, field: str) -> int:
    """A field in kB of a file of lines such as "MemTotal: 16384 kB", in bytes.

    Raises:
        KeyError: the file has no such field.
    """
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[field].split()[0]) * 1024
