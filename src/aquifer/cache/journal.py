"""Changes of the device's half of a KV cache, as values that can be sent to another process.

Each value is one call of `KVTensors` or of its `Residency`, which a follower repeats. Pages are
named by the leader's logical numbers, blocks by their numbers, bytes by their offsets in the
cache's addresses. All values are frozen and pickle.
"""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.memory.residency import PageOp


@dataclass(frozen=True, slots=True)
class Entered:
    """New entries of the block table: `table[slots[i], indices[i]] = blocks[i]`."""

    slots: tuple[int, ...]
    indices: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies within the range, made by one launch."""

    pieces: tuple[tuple[int, int, int], ...]  # (source, destination, length) in bytes


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """Bytes that were copied to host memory."""

    offset_bytes: int  # in the range
    host_bytes: int  # offset in the host memory
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """Bytes that were copied back from host memory."""

    offset_bytes: int
    host_bytes: int
    num_bytes: int


PartOp = PageOp | Entered | Copies | CopiedOut | CopiedIn


@dataclass(frozen=True, slots=True)
class InPart:
    """A change of one part of a cache whose layers keep KV of different tokens."""

    part: int
    op: PartOp


KVOp = PartOp | InPart
