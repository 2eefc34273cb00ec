"""The device's half of a KV cache: addresses, pages under them, block tables, tensors over them.

A manager (`virtual.py`, `paged.py`) keeps the books, that is which block belongs to which sequence,
and calls the verbs of `KVTensors`. A runner needs only `flush` and `view` of a `KVTensors`.

All changes of this half can be recorded (`record`, `take_journal`), by logical page numbers, block
numbers and byte offsets. A `KVFollower` in another process repeats them on pages of its own, so
that its memory is equal wherever a kernel reads (`journal.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.copies import PendingCopies
from aquifer.cache.journal import CopiedIn, CopiedOut, Copies, Entered, PartOp
from aquifer.cache.layout import KVLayout
from aquifer.cache.spans import IntArray, Rows
from aquifer.cache.view import StepView, Workspaces
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import Residency
from aquifer.memory.transfer import upload
from aquifer.sizes import format_size

_MOST_ADDRESSES_BYTES = 1 << 46
"""Addresses that one cache may reserve: half of those that a process has on x86."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Addresses of a KV cache: rows of tokens at equal distances, slots or blocks.

    The addresses begin with the anchor. Kernels always get the address of the first row. They read
    nothing there that was not written, but Triton's launcher asks the driver about a tensor's first
    byte, and refuses the launch if nothing is mapped there. So on a GPU the pages of one token stay
    mapped at the beginning, where no sequence is.
    """

    layout: KVLayout
    page_bytes: int
    num_anchor_pages: int
    num_rows: int
    row_tokens: int
    row_bytes: int  # from row to row
    num_bytes: int  # addresses of the rows, and of the windows behind them
    table_shape: tuple[int, int] | None  # [slots, blocks of a slot]; None where rows are slots

    @classmethod
    def slots(cls, pool: PagePool, layout: KVLayout, max_seqs: int, max_tokens: int) -> KVShape:
        """A row for each slot, in whole pages; slot 0 is the anchor's.

        Behind the slots is a window for each: a place for a page to be copied from.

        Raises:
            ConfigError: there are not so many addresses.
        """
        slot_pages = _num_pages(max_tokens * layout.token_bytes, pool.page_bytes)
        num_slots = max_seqs + 1
        num_bytes = (slot_pages + 1) * num_slots * pool.page_bytes
        _check_addresses(num_bytes, max_seqs, max_tokens)
        return cls(
            layout=layout,
            page_bytes=pool.page_bytes,
            num_anchor_pages=_anchor_pages(pool, layout),
            num_rows=num_slots,
            row_tokens=max_tokens,
            row_bytes=slot_pages * pool.page_bytes,
            num_bytes=num_bytes,
            table_shape=None,
        )

    @classmethod
    def blocks(
        cls,
        pool: PagePool,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        block_size: int,
        num_blocks: int,
    ) -> KVShape:
        """`num_blocks` rows of `block_size` tokens, behind the anchor.

        Raises:
            ConfigError: there are not so many addresses.
        """
        num_anchor_pages = _anchor_pages(pool, layout)
        block_bytes = block_size * layout.token_bytes
        num_rows = num_blocks + _first_block(num_anchor_pages, pool.page_bytes, block_bytes)
        _check_addresses(num_rows * block_bytes, max_seqs, max_tokens)
        return cls(
            layout=layout,
            page_bytes=pool.page_bytes,
            num_anchor_pages=num_anchor_pages,
            num_rows=num_rows,
            row_tokens=block_size,
            row_bytes=block_bytes,
            num_bytes=num_rows * block_bytes,
            table_shape=(max_seqs + 1, -(-max_tokens // block_size)),
        )

    @property
    def first_row(self) -> int:
        """The first row that has no byte in the anchor, and begins where a page does.

        So rows that lie side by side from there on take no page more than their bytes do.
        """
        if self.table_shape is None:
            return 1
        return _first_block(self.num_anchor_pages, self.page_bytes, self.row_bytes)


class KVTensors:
    """Addresses, pages and tables of one KV cache, as kernels see them.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        shape: shape of the addresses.

    Attributes:
        owner: as given.
        shape: as given.
        range: the addresses.
        residency: the pages under them.
        layers: K and V of each layer, [rows, row_tokens, kv_heads, dim] each; see `KVLayout.split`.
        table: [slots, blocks of a slot] int32, on the host; empty where rows are slots.
    """

    def __init__(self, pool: PagePool, owner: Owner, shape: KVShape) -> None:
        self.owner = owner
        self.shape = shape
        self.range = VirtualRange(pool.pages, shape.num_bytes, shape.page_bytes)
        self.residency = Residency(pool, owner, self.range)
        self._anchor = Residency(pool, Owner(owner.model, Kind.OVERHEAD), self.range)
        self._is_open = not shape.num_anchor_pages
        self._retired = pool.retired
        layout = shape.layout
        tokens = self.range.tensor(
            (shape.num_rows, shape.row_tokens, layout.token_elements),
            layout.dtype,
            stride=(shape.row_bytes // layout.dtype.itemsize, layout.token_elements, 1),
        )
        self.layers = layout.split(tokens)
        self._workspaces = Workspaces()
        self._copies = PendingCopies(self.range, shape.row_bytes)
        device = pool.driver.device
        self.table: npt.NDArray[np.int32] = np.zeros(shape.table_shape or (0, 0), np.int32)
        # What kernels read: the same memory on the host, else a copy that `flush` updates.
        self._is_copied = device.type != "cpu"
        self._device_table: torch.Tensor | None = None
        if shape.table_shape is not None:
            self._device_table = (
                torch.zeros(shape.table_shape, dtype=torch.int32, device=device)
                if self._is_copied
                else torch.from_numpy(self.table)
            )
        # (slots, indices) of entries that the copy does not have yet
        self._entered: list[tuple[IntArray, IntArray]] = []
        self._journal: list[PartOp] = []
        self._note: Callable[[PartOp], None] | None = None  # called with each change

    def open(self) -> bool:
        """Take the anchor's pages, before any others; False means that the pool is short."""
        if not self._is_open:
            self._is_open = self._anchor.populate([range(self.shape.num_anchor_pages)])
        return self._is_open

    def close(self) -> None:
        """Give the addresses back. Pre-condition: all pages but the anchor's were given up."""
        if self._is_open:
            self._anchor.give_up(range(self.shape.num_anchor_pages))
        self._retired.settle(self.range)
        self.range.close()

    # --- the journal -------------------------------------------------------------------------

    def record(self, note: Callable[[PartOp], None] | None = None) -> None:
        """Begin to record all changes. Pre-condition: no page has been mapped yet.

        Args:
            note: called with each change, in place of keeping it for `take_journal`.
        """
        if self.range.num_mapped_pages > self.shape.num_anchor_pages:
            raise InvariantError("a journal begins before the first page is mapped")
        self._note = self.residency.record = note or self._journal.append

    def take_journal(self) -> tuple[PartOp, ...]:
        """All changes since recording began, or since the last call, in order.

        Pending copies are recorded by `make_copies` or `flush`.
        """
        if self._note is None:
            raise InvariantError("nothing was recorded")
        ops = tuple(self._journal)
        self._journal.clear()
        return ops

    # --- verbs -------------------------------------------------------------------------------

    def enter(self, slots: IntArray, indices: IntArray, blocks: IntArray) -> None:
        """Write blocks into the table. All three arrays have the same length."""
        self.table[slots, indices] = blocks
        if self._is_copied:
            self._entered.append((slots, indices))
        if self._note is not None:
            self._note(
                Entered(tuple(slots.tolist()), tuple(indices.tolist()), tuple(blocks.tolist()))
            )

    @property
    def num_pending_copies(self) -> int:
        """Number of copies that were requested and are not launched yet."""
        return len(self._copies)

    @property
    def pending_copies(self) -> tuple[tuple[int, int, int], ...]:
        """(source, destination, length) in bytes of each copy that is not launched yet."""
        return self._copies.pieces

    def copy(self, source_byte: int, destination_byte: int, num_bytes: int) -> None:
        """Request a copy within the range. Both places must stay mapped until it is launched.

        Both begin where a row or a page begins, and the copy ends in the same row or page.
        """
        self._copies.add(source_byte, destination_byte, num_bytes)

    def make_copies(self) -> None:
        """Launch the pending copies together, after the work launched so far; does not wait."""
        if self._copies:
            if self._note is not None:
                self._note(Copies(self._copies.pieces))
            self._copies.launch()

    def rehearse(self) -> None:
        """Launch the kernels of copies and tables over nothing, to compile or load them."""
        if not self._is_open:
            return
        self._copies.rehearse()
        if self._device_table is not None:
            nothing = torch.zeros((3, 0), dtype=torch.int64, device=self._device_table.device)
            self._device_table[nothing[0], nothing[1]] = nothing[2].int()

    def copy_out(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Copy bytes of the range to host memory, after the work launched so far.

        Args:
            offset_bytes: offset of the first byte in the range.
            target: [bytes to copy] uint8, a part of the host memory in which the journal counts
                offsets.
        """
        self._require_no_copies()
        target.copy_(self._bytes(offset_bytes, len(target)), non_blocking=True)
        if self._note is not None:
            host_bytes = int(target.storage_offset())
            self._note(CopiedOut(offset_bytes, host_bytes, len(target)))

    def copy_in(self, offset_bytes: int, source: torch.Tensor) -> None:
        """The opposite of `copy_out`."""
        self._require_no_copies()
        self._bytes(offset_bytes, len(source)).copy_(source, non_blocking=True)
        if self._note is not None:
            host_bytes = int(source.storage_offset())
            self._note(CopiedIn(offset_bytes, host_bytes, len(source)))

    def flush(self) -> None:
        """Launch the pending copies, and send new table entries to the device.

        The latter is the cost of tables (vAttention, section 3.3).
        """
        self.make_copies()
        if not self._entered:
            return
        slots, indices = np.concatenate(self._entered, axis=1)
        self._entered.clear()
        # The entries' present values: one that was written twice must not depend on the order.
        entries = np.stack((slots, indices, self.table[slots, indices]))
        assert self._device_table is not None, "there are entries"
        device_slots, device_indices, blocks = upload(entries, self._device_table.device)
        self._device_table[device_slots, device_indices] = blocks.int()

    def view(self, rows: Rows, workspaces: Workspaces | None = None) -> StepView:
        """The addresses of one step, with attention over them. Pre-condition: room was reserved.

        It reads tensors only, so that a captured step stays valid as its rows change.

        Args:
            rows: the step's tokens.
            workspaces: kept by the caller, which shares them between caches.
        """
        layout, workspaces = self.shape.layout, workspaces or self._workspaces
        return StepView(layout, self.layers, rows, self._device_table, workspaces)

    def _require_no_copies(self) -> None:
        assert not self._copies, "pending copies come first: call make_copies"

    def _bytes(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        return self.range.tensor((num_bytes,), torch.uint8, offset_bytes)


def _check_addresses(num_bytes: int, max_seqs: int, max_tokens: int) -> None:
    if num_bytes > _MOST_ADDRESSES_BYTES:
        raise ConfigError(
            f"KV of {max_seqs} sequences of {max_tokens} tokens takes addresses of "
            f"{format_size(num_bytes)}, and there are {format_size(_MOST_ADDRESSES_BYTES)}; give "
            "a lower --max-model-len or --max-num-seqs"
        )


def _anchor_pages(pool: PagePool, layout: KVLayout) -> int:
    """Pages of one token; none on the host."""
    if pool.driver.device.type != "cuda":
        return 0
    return _num_pages(layout.token_bytes, pool.page_bytes)


def _first_block(num_anchor_pages: int, page_bytes: int, block_bytes: int) -> int:
    """The first block at or behind the end of the anchor that begins where a page does."""
    aligned_bytes = lcm(page_bytes, block_bytes)
    return _num_pages(num_anchor_pages * page_bytes, aligned_bytes) * (aligned_bytes // block_bytes)


def _num_pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)
