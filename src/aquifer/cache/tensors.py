"""The device's half of a KV cache: addresses, pages under them, block tables, tensors over them.

A manager (`virtual.py`, `paged.py`) keeps the books, that is which block belongs to which sequence,
and calls the verbs of `KVTensors`. A runner needs only `flush` and `view` of a `KVTensors`.

All changes of this half can be recorded (`record`, `take_journal`), by logical page numbers, block
numbers and byte offsets. A `KVFollower` in another process repeats them on pages of its own, so
that its memory is equal wherever a kernel reads (`journal.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.journal import Entered
from aquifer.cache.layout import KVLayout
from aquifer.cache.part_tensors import PartTensors
from aquifer.cache.spans import IntArray, Rows
from aquifer.cache.view import StepView, Workspaces
from aquifer.errors import ConfigError
from aquifer.memory.guard import POISON
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.transfer import upload
from aquifer.sizes import format_size

_MOST_ADDRESSES_BYTES = 1 << 46
"""Addresses that one cache may reserve: half of those that a process has on x86."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Addresses of a KV cache: rows of tokens at equal distances, slots or blocks.

    All sizes are those of token-major KV, where there is one buffer. Layer-major, each of
    `num_buffers` has an equal part of each token, row and page: what is called a page below is a
    stripe then, a page in each buffer (`aquifer.memory.stripes`).

    The addresses begin with the anchor. Kernels always get the address of the first row. They read
    nothing there that was not written, but Triton's launcher asks the driver about a tensor's first
    byte, and refuses the launch if nothing is mapped there. So on a GPU the pages of one token stay
    mapped at the beginning, where no sequence is.
    """

    layout: KVLayout
    page_bytes: int  # of a place: a page, or a stripe
    num_anchor_pages: int
    num_rows: int
    row_tokens: int
    row_bytes: int  # from row to row
    num_bytes: int  # addresses of the rows, and of the windows behind them
    table_shape: tuple[int, int] | None  # [slots, blocks of a slot]; None where rows are slots
    num_buffers: int = 1
    # A row behind the others with the guard page under all of it, on pages of its own, for entries
    # of the table that are not in use; None where the pool has no guards.
    guard_row: int | None = None

    @classmethod
    def slots(
        cls,
        pool: PagePool,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        window_pages: int = 1,
        *,
        is_layer_major: bool = False,
    ) -> KVShape:
        """A row for each slot, in whole pages; slot 0 is the anchor's.

        Behind the slots is a window of `window_pages` for each: a place for a page to be copied
        from.

        Raises:
            ConfigError: there are not so many addresses, or the layout cannot be layer-major.
        """
        num_buffers = layout.num_buffers if is_layer_major else 1
        page_bytes = pool.page_bytes * num_buffers
        slot_pages = _num_pages(max_tokens * layout.token_bytes, page_bytes)
        num_slots = max_seqs + 1
        num_bytes = (slot_pages + window_pages) * num_slots * page_bytes
        check_addresses(num_bytes, max_seqs, max_tokens)
        return cls(
            layout=layout,
            page_bytes=page_bytes,
            num_anchor_pages=_anchor_pages(pool, layout, page_bytes),
            num_rows=num_slots,
            row_tokens=max_tokens,
            row_bytes=slot_pages * page_bytes,
            num_bytes=num_bytes,
            table_shape=None,
            num_buffers=num_buffers,
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
        *,
        is_layer_major: bool = False,
    ) -> KVShape:
        """`num_blocks` rows of `block_size` tokens, behind the anchor.

        Raises:
            ConfigError: there are not so many addresses, or the layout cannot be layer-major.
        """
        num_buffers = layout.num_buffers if is_layer_major else 1
        page_bytes = pool.page_bytes * num_buffers
        num_anchor_pages = _anchor_pages(pool, layout, page_bytes)
        block_bytes = block_size * layout.token_bytes
        num_rows = num_blocks + _first_block(num_anchor_pages, page_bytes, block_bytes)
        num_bytes, guard_row = num_rows * block_bytes, None
        if pool.guards is not None:
            aligned_rows = lcm(page_bytes, block_bytes) // block_bytes
            guard_row = -(-num_rows // aligned_rows) * aligned_rows
            num_bytes = (guard_row + 1) * block_bytes
        num_bytes = _num_pages(num_bytes, page_bytes) * page_bytes
        check_addresses(num_bytes, max_seqs, max_tokens)
        return cls(
            layout=layout,
            page_bytes=page_bytes,
            num_anchor_pages=num_anchor_pages,
            num_rows=num_rows,
            row_tokens=block_size,
            row_bytes=block_bytes,
            num_bytes=num_bytes,
            table_shape=(max_seqs + 1, -(-max_tokens // block_size)),
            num_buffers=num_buffers,
            guard_row=guard_row,
        )

    @property
    def first_row(self) -> int:
        """The first row that has no byte in the anchor, and begins where a page does.

        So rows that lie side by side from there on take no page more than their bytes do.
        """
        if self.table_shape is None:
            return 1
        return _first_block(self.num_anchor_pages, self.page_bytes, self.row_bytes)

    @property
    def guard_places(self) -> range:
        """The places of the guard page under the guard row."""
        if self.guard_row is None:
            return range(0)
        first = self.guard_row * self.row_bytes // self.page_bytes
        return range(first, first + _num_pages(self.row_bytes, self.page_bytes))


class KVTensors(PartTensors):
    """Addresses, pages and tables of one KV cache, as kernels see them.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        shape: shape of the addresses.

    Attributes:
        shape: as given.
        layers: K and V of each layer, [rows, row_tokens, kv_heads, dim] each; see `KVLayout.split`.
            Behind the rows of sequences may be the guard row.
        table: [slots, blocks of a slot] int32, on the host; empty where rows are slots.
    """

    def __init__(self, pool: PagePool, owner: Owner, shape: KVShape) -> None:
        super().__init__(
            pool,
            owner,
            shape.num_bytes,
            shape.row_bytes,
            shape.num_anchor_pages,
            shape.num_buffers,
        )
        self.shape = shape
        self.layers = _layers(self.range, shape)
        self._workspaces = Workspaces()
        device = pool.driver.device
        unused = shape.guard_row or 0
        self.table: npt.NDArray[np.int32] = np.full(shape.table_shape or (0, 0), unused, np.int32)
        # What kernels read: the same memory on the host, else a copy that `flush` updates.
        self._is_copied = device.type != "cpu"
        self._device_table: torch.Tensor | None = None
        if shape.table_shape is not None:
            self._device_table = (
                torch.full(shape.table_shape, unused, dtype=torch.int32, device=device)
                if self._is_copied
                else torch.from_numpy(self.table)
            )
        # (slots, indices) of entries that the copy does not have yet
        self._entered: list[tuple[IntArray, IntArray]] = []

    def open(self) -> bool:
        """See `PartTensors.open`; the guard row gets its page too."""
        if not super().open():
            return False
        if self.guard is not None and not self.guard.guards and self.shape.guard_row is not None:
            self.move_guards(())
        return True

    def enter(self, slots: IntArray, indices: IntArray, blocks: IntArray) -> None:
        """Write blocks into the table. All three arrays have the same length."""
        self.table[slots, indices] = blocks
        if self._is_copied:
            self._entered.append((slots, indices))
        if self._note is not None:
            self._note(
                Entered(tuple(slots.tolist()), tuple(indices.tolist()), tuple(blocks.tolist()))
            )

    def poison_rows(self, rows: IntArray) -> None:
        """Fill mapped rows that were given to another sequence, where the pool has guards."""
        if self.guard is not None:
            num_rows, num_buffers = self.shape.num_rows, self.shape.num_buffers
            row_bytes = self.shape.row_bytes // num_buffers
            memory = self.range.tensor(
                (num_buffers, num_rows, row_bytes),
                torch.uint8,
                stride=(self.range.num_bytes // num_buffers, row_bytes, 1),
            )
            memory.index_fill_(1, upload(rows, memory.device), POISON)

    def move_guards(self, places: Iterable[int]) -> None:
        """Have the guard page at these places of all buffers and under the guard row, and at no
        others. Pre-condition: the pool has guards."""
        assert self.guard is not None
        num_places = self.residency.num_places
        starts = range(0, num_places * self.shape.num_buffers, num_places)
        wanted = [*places, *self.shape.guard_places]
        self.guard.move_guards(start + place for start in starts for place in wanted)

    def guard_entries(self, num_blocks: IntArray) -> None:
        """Have all unused entries of the table point to the guard row, where there is one.

        Args:
            num_blocks: [slots], the entries of each slot up to the end of the used ones.
        """
        row = self.shape.guard_row
        if row is None:
            return
        is_unused = np.arange(self.table.shape[1]) >= num_blocks[:, None]
        slots, indices = (is_unused & (self.table != row)).nonzero()
        if len(slots):
            self.enter(slots, indices, np.full(len(slots), row))

    def rehearse(self) -> None:
        """Launch the kernels of copies and tables over nothing, to compile or load them."""
        super().rehearse()
        if self._is_open and self._device_table is not None:
            nothing = torch.zeros((3, 0), dtype=torch.int64, device=self._device_table.device)
            self._device_table[nothing[0], nothing[1]] = nothing[2].int()

    def flush(self) -> None:
        """Launch the pending copies, and send new table entries to the device.

        The latter is the cost of tables (vAttention, section 3.3).
        """
        super().flush()
        if not self._entered:
            return
        slots, indices = np.concatenate(self._entered, axis=1)
        self._entered.clear()
        # The entries' present values: one that was written twice must not depend on the order.
        entries = np.stack((slots, indices, self.table[slots, indices]))
        assert self._device_table is not None, "there are entries"
        device_slots, device_indices, blocks = upload(entries, self._device_table.device)
        self._device_table[device_slots, device_indices] = blocks.int()

    def _bytes(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Layer-major too, tokens are kept one after the other in host memory."""
        num_buffers = self.shape.num_buffers
        if num_buffers == 1:
            return super()._bytes(offset_bytes, num_bytes)
        part_bytes = self.shape.layout.token_bytes // num_buffers
        shape = (num_bytes // self.shape.layout.token_bytes, num_buffers, part_bytes)
        stride = (part_bytes, self.range.num_bytes // num_buffers, 1)
        return self.range.tensor(shape, torch.uint8, offset_bytes // num_buffers, stride)

    def view(self, rows: Rows, workspaces: Workspaces | None = None) -> StepView:
        """The addresses of one step, with attention over them. Pre-condition: room was reserved.

        It reads tensors only, so that a captured step stays valid as its rows change.

        Args:
            rows: the step's tokens.
            workspaces: kept by the caller, which shares them between caches.
        """
        layout, workspaces = self.shape.layout, workspaces or self._workspaces
        return StepView(layout, self.layers, rows, self._device_table, workspaces)


def _layers(range_: VirtualRange, shape: KVShape) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer over a range."""
    layout, num_buffers = shape.layout, shape.num_buffers
    elements = layout.token_elements // num_buffers  # of a token in a buffer
    row_elements = shape.row_bytes // num_buffers // layout.dtype.itemsize
    buffers = range_.tensor(
        (num_buffers, (shape.guard_row or shape.num_rows - 1) + 1, shape.row_tokens, elements),
        layout.dtype,
        stride=(
            range_.num_bytes // num_buffers // layout.dtype.itemsize,
            row_elements,
            elements,
            1,
        ),
    )
    return layout.split(buffers[0]) if num_buffers == 1 else layout.split_buffers(buffers)


def check_addresses(num_bytes: int, max_seqs: int, max_tokens: int) -> None:
    """Check that a process can reserve addresses of such a size for a cache.

    Raises:
        ConfigError: there are not so many.
    """
    if num_bytes > _MOST_ADDRESSES_BYTES:
        raise ConfigError(
            f"KV of {max_seqs} sequences of {max_tokens} tokens takes addresses of "
            f"{format_size(num_bytes)}, and there are {format_size(_MOST_ADDRESSES_BYTES)}; give "
            "a lower --max-model-len or --max-num-seqs"
        )


def _anchor_pages(pool: PagePool, layout: KVLayout, page_bytes: int) -> int:
    """Pages of one token; none on the host."""
    if pool.driver.device.type != "cuda":
        return 0
    return _num_pages(layout.token_bytes, page_bytes)


def _first_block(num_anchor_pages: int, page_bytes: int, block_bytes: int) -> int:
    """The first block at or behind the end of the anchor that begins where a page does."""
    aligned_bytes = lcm(page_bytes, block_bytes)
    return _num_pages(num_anchor_pages * page_bytes, aligned_bytes) * (aligned_bytes // block_bytes)


def _num_pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)
