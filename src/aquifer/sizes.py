"""Sizes as text: "4GiB", "32K"."""

from __future__ import annotations

import math
import re

from aquifer.errors import ConfigError

_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes from "32K", "4G", "4GiB", "1.5 GB" or a plain number; all units are powers of 1024.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    num_bytes = math.inf if match is None else float(match[1]) * _FACTORS[match[2]]
    if math.isinf(num_bytes):
        raise ConfigError(f"{text!r} is not a size; write it like 512M, 4G or 4GiB")
    return int(num_bytes)


def format_size(num_bytes: float) -> str:
    """Bytes rounded for people: "4.00 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def exact_size(num_bytes: int) -> str:
    """The shortest text that `parse_size` reads as this number: "4GiB", "1000"."""
    for unit in ("T", "G", "M", "K"):
        if num_bytes and num_bytes % _FACTORS[unit] == 0:
            return f"{num_bytes // _FACTORS[unit]}{unit}iB"
    return str(num_bytes)
