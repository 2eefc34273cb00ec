"""The header of a safetensors file: an 8-byte length, then a JSON table of tensors, then the data.

What the format's specification forbids is refused, as its own library does: the tensors must fill
the data without gaps or overlaps, in any order, and no name may occur twice.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from aquifer.errors import ConfigError, one_line

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_MAX_HEADER_BYTES = 100 << 20  # the limit that the format's own library has
_MOST_DIMS = 64  # dimensions of a tensor of torch
_MOST_DIGITS = 20  # of 64 bits
_MOST_SHOWN = 200  # characters of a tensor's name in a message


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a header.

    Attributes:
        dtype: dtype of its elements.
        shape: its shape.
        offset_bytes: offset of the first byte in the file.
        num_bytes: bytes of all elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """Read and check the header of a safetensors file; return its tensors by name.

    Raises:
        ConfigError: the file cannot be read, or is not as the format's specification asks.
    """
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < header_bytes <= min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise ConfigError(
                    f"{file} is truncated or no safetensors file (bad header length); "
                    "download it again"
                )
            raw = stream.read(header_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    data_start = 8 + header_bytes
    try:
        header = json.loads(
            raw.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_integer,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
        entries = {
            name: _entry(file, name, entry, data_start, file_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{file} has a damaged safetensors header ({one_line(error)}); download it again"
        ) from error
    _check_covered(file, entries, data_start, file_bytes)
    return entries


def quoted(name: str) -> str:
    """A name in a file, of any length, as messages show it."""
    is_long = len(name) > _MOST_SHOWN
    return repr(name[: _MOST_SHOWN - 3] + "..." if is_long else name)


def _entry(
    file: Path, name: str, entry: Mapping[str, Any], data_start: int, file_bytes: int
) -> Entry:
    label = quoted(name)
    name.encode()  # JSON can express one half of a surrogate pair
    if entry["dtype"] not in _DTYPES:
        raise ConfigError(
            f"{file}: tensor {label} has the unknown dtype {quoted(entry['dtype'])}; convert it to "
            "one of BF16, F16 and F32"
        )
    dtype = _DTYPES[entry["dtype"]]
    if len(entry["shape"]) > _MOST_DIMS:
        raise ConfigError(f"{file}: tensor {label} has more than {_MOST_DIMS} dimensions")
    shape = _integers(entry["shape"])
    begin, end = _integers(entry["data_offsets"])
    num_bytes = math.prod(shape) * dtype.itemsize
    if min((begin, *shape)) < 0 or end - begin != num_bytes:
        raise ConfigError(
            f"{file}: tensor {label} of shape {list(shape)} takes {num_bytes} bytes, the header "
            f"gives it {end - begin}; download it again"
        )
    if data_start + end > file_bytes:
        raise ConfigError(
            f"{file} is truncated: tensor {label} ends at byte {data_start + end}, the file at "
            f"{file_bytes}; download it again"
        )
    return Entry(dtype, shape, data_start + begin, num_bytes)


def _check_covered(
    file: Path, entries: Mapping[str, Entry], data_start: int, file_bytes: int
) -> None:
    """Check that each byte of the data belongs to one tensor.

    Raises:
        ConfigError: tensors overlap, or bytes before, between or after them belong to none.
    """
    end_bytes = data_start
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset_bytes, item[1].num_bytes)
    ):
        if entry.offset_bytes != end_bytes:
            what = "overlaps another one" if entry.offset_bytes < end_bytes else "follows a gap"
            raise ConfigError(
                f"{file} has a damaged safetensors header: tensor {quoted(name)} {what} at byte "
                f"{entry.offset_bytes}; download it again, or save it with the safetensors library"
            )
        end_bytes += entry.num_bytes
    if end_bytes != file_bytes:
        raise ConfigError(
            f"{file} has {file_bytes - end_bytes} bytes behind its last tensor; download it again"
        )


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text.

    Raises:
        ValueError: it has a name twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for name, other in pairwise(names) if name == other)
        raise ValueError(f"{quoted(twice)} occurs twice")
    return values


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse(literal: str) -> None:
    raise ValueError(f"{quoted(literal)} is no whole number")


def _integers(values: Any) -> tuple[int, ...]:
    """A list of whole numbers.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(values, list) or not all(type(n) is int for n in values):
        raise TypeError("shapes and offsets must be lists of whole numbers")
    return tuple(values)
