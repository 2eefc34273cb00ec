"""What weights are: keys of groups of parameters, equal where their bytes are.

The key of a group is a hash of how it is made: shapes, dtypes, forms, factors, order, and which
bytes of which files. So models of one checkpoint have equal keys, and nothing has to be read.

Models of several checkpoints, such as fine-tunes, may have equal tensors in different files. They
are found when a model is registered, in two steps (Tangram, section 3.1, keeps a fingerprint of
each tensor; most of them need not be read for that):

1. Groups that are alike in all but the files are compared by samples: the first and last bytes of
   each tensor. Tensors that were trained differ there, since training changes every number.
2. Of those that are equal so far the whole contents are hashed, and the hashes take the place of
   the files in the key. They are kept in the cache folder, for as long as size, time and inode of
   the file stay the same.

The hash is cryptographic (BLAKE2b), so that no checkpoint can be made to pass for another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from aquifer.weights.checkpoint import Checkpoint, StoredTensor
from aquifer.weights.parameters import Parameter

SAMPLE_BYTES = 4096
"""Size of a sample, at either end of a tensor."""

_PIECE_BYTES = 8 << 20  # read at once
_DIGEST_BYTES = 20
_NUM_THREADS = 8  # BLAKE2b makes about 1 GB/s each


@dataclass(frozen=True, eq=False)
class GroupOrigin:
    """How a group of parameters is made from a checkpoint.

    Args:
        parameters: in the order in which they lie in the group.
        checkpoint: where their stored tensors are.
    """

    parameters: tuple[Parameter, ...]
    checkpoint: Checkpoint

    @cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The stored tensors in the order in which they are used."""
        tensors = self.checkpoint.tensors
        return tuple(
            tensors[source.name] for parameter in self.parameters for source in parameter.sources
        )

    @cached_property
    def likeness(self) -> str:
        """A hash of everything but the bytes of the stored tensors."""
        tensors = self.checkpoint.tensors
        parts: list[object] = []
        for parameter in self.parameters:
            parts += [str(parameter.dtype), parameter.shape, repr(parameter.shard)]
            for source in parameter.sources:
                dtype = str(tensors[source.name].dtype)
                how = source.form.name, source.factors, repr(source.order)
                parts.append((repr(source.index), *how, dtype))
        return _hash(parts)

    def key_by_file(self) -> str:
        """The key, if the files are all that is known of the contents.

        Raises:
            OSError: a file cannot be looked at.
        """
        places = [(*file_stamp(s.file), s.offset_bytes, s.num_bytes) for s in self.stored]
        return _hash([self.likeness, *places])

    def key_by_contents(self, digests: Callable[[StoredTensor], str]) -> str:
        """The key, if the hash of each stored tensor is known."""
        return _hash([self.likeness, *map(digests, self.stored)])


def file_stamp(file: Path) -> tuple[int, int, int, int]:
    """Device, inode, size in bytes and time of the latest change in ns of a file.

    Raises:
        OSError: it cannot be looked at.
    """
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def keys_of_equals(origins: Iterable[GroupOrigin], folder: Path) -> dict[GroupOrigin, str]:
    """New keys for groups that may be equal to a group of another checkpoint: by their contents.

    Reads a sample of those that are alike, and all of those of equal samples. Those of a checkpoint
    that cannot be read are left out.

    Args:
        origins: of all models.
        folder: where hashes are kept; without a permission to write, they are not kept.
    """
    candidates = list(origins)
    for find in (_likeness, _sample):
        found: defaultdict[Any, list[GroupOrigin]] = defaultdict(list)
        for origin in candidates:
            with suppress(OSError):
                found[find(origin)].append(origin)
        candidates = [
            origin for alike in found.values() if _have_several_files(alike) for origin in alike
        ]
    files = sorted({stored.file for origin in candidates for stored in origin.stored})
    wanted = {stored for origin in candidates for stored in origin.stored}
    digests: dict[StoredTensor, str] = {}
    with ThreadPoolExecutor(_NUM_THREADS, "aquifer-hash") as threads:
        for file in files:
            with suppress(OSError):
                digests |= _digests(file, [s for s in wanted if s.file == file], folder, threads)
    return {
        origin: origin.key_by_contents(digests.__getitem__)
        for origin in candidates
        if all(stored in digests for stored in origin.stored)
    }


def cache_folder() -> Path:
    """Where hashes are kept: `$XDG_CACHE_HOME/aquifer/fingerprints`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "aquifer" / "fingerprints"


def _likeness(origin: GroupOrigin) -> Any:
    return origin.likeness


def _sample(origin: GroupOrigin) -> Any:
    """The likeness, and the first and last bytes of each stored tensor."""
    samples = []
    for stored in origin.stored:
        with stored.file.open("rb") as stream:
            num_bytes = min(SAMPLE_BYTES, stored.num_bytes)
            for offset in (stored.offset_bytes, stored.offset_bytes + stored.num_bytes - num_bytes):
                stream.seek(offset)
                samples.append(stream.read(num_bytes))
    return origin.likeness, _hash(samples)


def _have_several_files(origins: Sequence[GroupOrigin]) -> bool:
    places = ([(stored.file, stored.offset_bytes) for stored in each.stored] for each in origins)
    return len({tuple(place) for place in places}) > 1


def _digests(
    file: Path, wanted: Sequence[StoredTensor], folder: Path, threads: ThreadPoolExecutor
) -> dict[StoredTensor, str]:
    """Hashes of the contents of stored tensors of a file, from the cache folder or by reading.

    Raises:
        OSError: the file cannot be read.
    """
    stamp = list(file_stamp(file))
    kept_in = folder / f"{_hash([str(file.resolve())])}.json"
    kept = _read_kept(kept_in, stamp)
    unknown = [stored for stored in wanted if _place(stored) not in kept]
    kept |= zip(map(_place, unknown), threads.map(_digest, unknown), strict=True)
    if list(file_stamp(file)) != stamp:
        raise OSError(f"{file} changed while it was read")
    if unknown:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            new = kept_in.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"stamp": stamp, "digests": kept}))
            new.replace(kept_in)
    return {stored: kept[_place(stored)] for stored in wanted}


def _read_kept(kept_in: Path, stamp: list[int]) -> dict[str, str]:
    """The hashes that are kept of a file, if it is still the same."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(kept_in.read_text())
        if kept["stamp"] == stamp:
            return {str(place): str(digest) for place, digest in kept["digests"].items()}
    return {}


def _place(stored: StoredTensor) -> str:
    return f"{stored.offset_bytes}+{stored.num_bytes}"


def _digest(stored: StoredTensor) -> str:
    """Hash of the contents of a stored tensor."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    left_bytes = stored.num_bytes
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.offset_bytes)
        while left_bytes:
            piece = stream.read(min(left_bytes, _PIECE_BYTES))
            if not piece:
                raise OSError(f"{stored.file} ended early")
            digest.update(piece)
            left_bytes -= len(piece)
    return digest.hexdigest()


def _hash(parts: Iterable[object]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(repr(list(parts)).encode())
    return digest.hexdigest()
