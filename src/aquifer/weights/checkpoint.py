"""A Hugging Face checkpoint directory: configuration and tensor headers, checked before loading.

Tensors are read from their byte ranges straight into their final place. For that, the headers of
safetensors files are parsed by our own code: the format's own library returns new tensors, which
would be a second copy in memory.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aquifer.errors import ConfigError, one_line
from aquifer.fields import LIST_BYTES, Fields, is_there, read_fields
from aquifer.weights.forms import Form, Target
from aquifer.weights.header import quoted, read_header

_CONVERT_BYTES = 8 << 20  # scratch buffer for tensors that are converted, transposed or decoded
_MOST_NAME_BYTES = 255  # of a file, in the file systems of Linux
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
        tensors = _stored_tensors(folder)
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


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all safetensors files of a checkpoint, by name.

    Raises:
        ConfigError: a file is missing or damaged, or a tensor is in several files and the index
            does not say in which one.
    """
    single = folder / "model.safetensors"
    if is_there(single):
        return _tensors_of(single)
    index = folder / "model.safetensors.index.json"
    files = _files_of_index(folder, index)
    found: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for file in sorted(set(files.values())):
        for name, stored in _tensors_of(file).items():
            found[name].append(stored)
    tensors: dict[str, StoredTensor] = {}
    for name, places in found.items():
        meant = [stored for stored in places if stored.file == files.get(name)]
        if len(places) > 1 and not meant:
            raise ConfigError(
                f"{folder}: tensor {quoted(name)} is in {places[0].file.name} and in "
                f"{places[1].file.name}, and {index.name} names neither for it; download it again"
            )
        tensors[name] = (meant or places)[0]
    return tensors


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(file, entry.dtype, entry.shape, entry.offset_bytes, entry.num_bytes)
        for name, entry in read_header(file).items()
    }


def _files_of_index(folder: Path, index: Path) -> dict[str, Path]:
    """The file of each tensor that an index lists.

    Raises:
        ConfigError: there is no index, or it is damaged, or a file is missing.
    """
    if not is_there(index):
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
    files = {tensor: folder / _file_name(weight_map, tensor) for tensor in weight_map.values}
    if not files:
        raise ConfigError(f"{index} has no weight_map from tensors to files; download it again")
    missing = [file.name for file in sorted(set(files.values())) if not file.is_file()]
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
