"""A Hugging Face checkpoint directory: configuration and tensor headers, checked before loading.

Tensors are read from their byte ranges straight into their final place. For that, the header of a
safetensors file (an 8-byte length, a JSON table, then the data) is parsed here: the format's own
library returns new tensors, which would be a second copy in memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aquifer.errors import ConfigError, one_line
from aquifer.fields import LIST_BYTES, Fields, read_fields
from aquifer.weights.forms import Form, Target

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
_CONVERT_BYTES = 8 << 20  # scratch buffer for tensors that are converted, transposed or decoded
_MOST_DIMS = 64  # dimensions of a tensor of torch
_MOST_NAME_BYTES = 255  # of a file, in the file systems of Linux
_MOST_SHOWN = 200  # characters of a tensor's name in a message
_MOST_NAMED = 3  # names of missing files in one message


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location, dtype and shape of a tensor on disk, or of a part of one.

    Attributes:
        file: the file.
        dtype: dtype of its elements.
        shape: its shape.
        offset_bytes: offset of the first byte in the file.
        num_bytes: bytes of all elements.
        run_bytes: bytes that lie together; all of them, unless it is a part made by `narrow`.
        step_bytes: from the beginning of such a run to that of the next one.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    run_bytes: int = -1
    step_bytes: int = 0

    def __post_init__(self) -> None:
        if self.run_bytes < 0:
            object.__setattr__(self, "run_bytes", self.num_bytes)

    @property
    def is_contiguous(self) -> bool:
        """Whether all bytes lie together."""
        return self.run_bytes == self.num_bytes

    def narrow(self, dim: int, start: int, stop: int) -> StoredTensor:
        """The part with the indices [start, stop) of one dimension.

        Pre-condition: it is no such part itself, unless all bytes of it lie together.
        """
        assert self.is_contiguous
        inner_bytes = math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize
        run_bytes = (stop - start) * inner_bytes
        num_runs = math.prod(self.shape[:dim])
        return StoredTensor(
            self.file,
            self.dtype,
            (*self.shape[:dim], stop - start, *self.shape[dim + 1 :]),
            self.offset_bytes + start * inner_bytes,
            num_runs * run_bytes,
            run_bytes,
            self.shape[dim] * inner_bytes,
        )

    def places(self, start_bytes: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset in the file, length) in bytes of each run of a stretch of it, in order.

        Args:
            start_bytes: first byte of the stretch, counted in the bytes of the tensor alone.
            num_bytes: its length.
        """
        while num_bytes:
            number, within = divmod(start_bytes, self.run_bytes)
            count = min(self.run_bytes - within, num_bytes)
            yield self.offset_bytes + number * self.step_bytes + within, count
            start_bytes += count
            num_bytes -= count


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with `config.json` and safetensors files.

    `tensors` is empty only if the checkpoint was opened by `without_tensors`.
    """

    path: Path
    fields: Fields  # of config.json
    tensors: Mapping[str, StoredTensor]

    @property
    def config(self) -> Mapping[str, Any]:
        """The values of config.json, unchecked."""
        return self.fields.values

    @property
    def architecture(self) -> str:
        """Name of the architecture in the configuration, for messages and reports.

        Raises:
            ConfigError: `architectures` is no list of texts, or `model_type` no text.
        """
        names = self.fields.texts("architectures")
        return names[0] if names else self.fields.text("model_type", default="unknown")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the configuration and all tensor headers.

        Raises:
            ConfigError: the directory does not exist, is no checkpoint, or has a damaged file.
        """
        folder = Path(path).expanduser()
        fields = read_config(folder)
        tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder):
            tensors.update(_read_header(file))
        if not tensors:
            raise ConfigError(f"{folder} holds no tensors: its safetensors files are empty")
        return cls(folder, fields, tensors)

    @classmethod
    def without_tensors(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the configuration only, for a model that needs no stored weights.

        Raises:
            ConfigError: the directory does not exist, or has no valid config.json.
        """
        folder = Path(path).expanduser()
        return cls(folder, read_config(folder), {})

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_into(stored: StoredTensor, target: Target) -> None:
    """Read a tensor to where it belongs, through a scratch buffer if that is no mere copy.

    Args:
        stored: the tensor, or a part of one.
        target: the part of a parameter to fill, on the CPU.

    Raises:
        ConfigError: the file ended early or cannot be read.
    """
    if target.is_copy(stored.dtype):
        read_stretch(stored, 0, target.part)
        return
    count = stored.num_bytes // stored.dtype.itemsize
    step = max(_CONVERT_BYTES // stored.dtype.itemsize, 1)
    scratch = torch.empty(min(step, count), dtype=stored.dtype)
    for start in range(0, count, step):
        piece = scratch[: count - start]
        read_stretch(stored, start * stored.dtype.itemsize, piece)
        target.write(piece, start)


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two whole tensors have the same dtype, shape and bytes.

    Raises:
        ConfigError: a file ended early or cannot be read.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if (first.file, first.offset_bytes) == (second.file, second.offset_bytes):
        return True
    pieces = torch.empty(2, min(_CONVERT_BYTES, first.num_bytes), dtype=torch.uint8)
    for start in range(0, first.num_bytes, _CONVERT_BYTES):
        one, other = pieces[:, : first.num_bytes - start]
        read_stretch(first, start, one)
        read_stretch(second, start, other)
        if not torch.equal(one, other):
            return False
    return True


def read_config(folder: Path) -> Fields:
    """Read the `config.json` of a checkpoint directory.

    Raises:
        ConfigError: the file does not exist, or is no valid JSON object.
    """
    file = folder / "config.json"
    try:
        if not folder.exists():
            raise ConfigError(f"no such model: {folder} does not exist")
        if not folder.is_dir() or not file.is_file():
            raise ConfigError(
                f"{folder} is not a checkpoint: give a directory that holds config.json and "
                "model.safetensors"
            )
    except OSError as error:  # no permission to look, or a name that is too long
        raise ConfigError(f"cannot read {folder}: {one_line(error)}") from error
    return read_fields(file)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Dtype that a checkpoint's configuration declares, or else that of its largest tensor.

    Tensors of other dtypes than models have, such as packed numbers, count only if all are so.

    Raises:
        ConfigError: the declaration is no text, or there is none and no tensor either.
    """
    fields = checkpoint.fields
    declared = fields.text("dtype", default=fields.text("torch_dtype", default="none"))
    dtype = getattr(torch, declared.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and Form.PLAIN.accepts(dtype):
        return dtype
    if not checkpoint.tensors:
        raise ConfigError(f"{fields.file} names no dtype; give --dtype bfloat16")
    tensors = checkpoint.tensors.values()
    return max(
        tensors, key=lambda stored: (Form.PLAIN.accepts(stored.dtype), stored.num_bytes)
    ).dtype


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.gguf")
        )
        found = (
            f" (found {', '.join(others[:3])}; convert it to safetensors first)" if others else ""
        )
        raise ConfigError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json{found}"
        )
    weight_map = read_fields(index, LIST_BYTES).section("weight_map")
    names = {_file_name(weight_map, tensor) for tensor in weight_map.values}
    files = [folder / name for name in sorted(names)]
    if not files:
        raise ConfigError(f"{index} has no weight_map from tensors to files; download it again")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise ConfigError(
            f"{folder} lacks {', '.join(missing[:_MOST_NAMED])}{more}, which its index names; "
            "download it again"
        )
    return files


def _file_name(weight_map: Fields, tensor: str) -> str:
    """The file that an index names for a tensor.

    The name must be that of a file in the checkpoint's own folder, so that no checkpoint can have
    other files read. The file itself may be a symbolic link, as in the cache of huggingface_hub.

    Raises:
        ConfigError: it is not.
    """
    name = weight_map.values[tensor]
    is_plain = isinstance(name, str) and name.isprintable() and name not in ("", ".", "..")
    if not is_plain or "/" in name or "\\" in name or len(os.fsencode(name)) > _MOST_NAME_BYTES:
        raise weight_map.error(tensor, "the name of a file in the same folder, without a path")
    return str(name)


def _read_header(file: Path) -> dict[str, StoredTensor]:
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
        header = json.loads(raw)
        return {
            name: _stored_tensor(file, name, entry, data_start, file_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except ConfigError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{file} has a damaged safetensors header ({one_line(error)}); download it again"
        ) from error


def _stored_tensor(
    file: Path, name: str, entry: dict[str, Any], data_start: int, file_bytes: int
) -> StoredTensor:
    label = _quoted(name)
    if entry["dtype"] not in _DTYPES:
        raise ConfigError(f"{file}: tensor {label} has the unknown dtype {_quoted(entry['dtype'])}")
    dtype = _DTYPES[entry["dtype"]]
    if len(entry["shape"]) > _MOST_DIMS:
        raise ConfigError(f"{file}: tensor {label} has more than {_MOST_DIMS} dimensions")
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
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
    return StoredTensor(file, dtype, shape, data_start + begin, num_bytes)


def _quoted(name: str) -> str:
    """A name in a file, of any length, as messages show it."""
    is_long = len(name) > _MOST_SHOWN
    return repr(name[: _MOST_SHOWN - 3] + "..." if is_long else name)


def read_range(file: Path, offset_bytes: int, out: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor from a file, without an intermediate buffer.

    Raises:
        ConfigError: the file ended early or cannot be read.
    """
    _read(file, [(offset_bytes, out.nbytes)], out)


def read_stretch(stored: StoredTensor, start_bytes: int, out: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor with a stretch of a stored tensor, run by run.

    Args:
        stored: the tensor, or a part of one.
        start_bytes: first byte of the stretch, counted in the bytes of the tensor alone.
        out: as long as the stretch.

    Raises:
        ConfigError: the file ended early or cannot be read.
    """
    _read(stored.file, stored.places(start_bytes, out.nbytes), out)


def _read(file: Path, places: Iterable[tuple[int, int]], out: torch.Tensor) -> None:
    """Fill a tensor from (offset, length) places of a file, one after the other."""
    buffer = out.view(-1).view(torch.uint8).numpy().data
    done = 0
    try:
        with file.open("rb", buffering=0) as stream:
            for offset_bytes, num_bytes in places:
                stream.seek(offset_bytes)
                end = done + num_bytes
                while done < end:
                    count = stream.readinto(buffer[done:end])
                    if not count:
                        raise ConfigError(f"{file} ended early: it changed while it was read")
                    done += count
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
