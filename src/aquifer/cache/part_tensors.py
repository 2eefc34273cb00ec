"""What all parts of a cache have on the device: addresses, pages under them, copies, a journal.

Parts with KV (`tensors.py`) and recurrent state (`state.py`) differ in what lies at the addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from aquifer.cache.copies import PendingCopies
from aquifer.cache.guard import GuardedResidency
from aquifer.cache.journal import CopiedIn, CopiedOut, Copies, PartOp
from aquifer.errors import InvariantError
from aquifer.memory.host_buffer import in_pieces
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import Residency
from aquifer.memory.stripes import StripedResidency


class PartTensors:
    """Addresses of one part of a cache, with the pages under them.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        num_bytes: addresses to reserve.
        row_bytes: distance of the rows between which copies are made.
        num_anchor_pages: places at the beginning under which something is mapped always, because
            Triton's launcher asks the driver about a tensor's first byte.
        num_buffers: buffers that the addresses are cut into; `num_bytes`, rows and all offsets are
            those of all of them together.

    Attributes:
        owner: as given.
        range: the addresses.
        pages: the pages under them.
        residency: the same, or the stripes of several buffers.
        guard: the same as `pages`, if the pool has guards; else None.
    """

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        num_bytes: int,
        row_bytes: int,
        num_anchor_pages: int,
        num_buffers: int = 1,
    ) -> None:
        self.owner = owner
        self.range = VirtualRange(pool.pages, num_bytes, pool.page_bytes)
        self.guard: GuardedResidency | None = None
        if pool.guards is not None:
            self.guard = GuardedResidency(pool, owner, self.range, pool.guards)
        self.pages = self.guard or Residency(pool, owner, self.range)
        anchor = Residency(pool, Owner(owner.model, Kind.OVERHEAD), self.range)
        self.residency: Residency | StripedResidency = self.pages
        self._anchor: Residency | StripedResidency = anchor
        self._num_buffers = num_buffers
        if num_buffers > 1:
            self.residency = StripedResidency(self.pages, num_buffers)
            self._anchor = StripedResidency(anchor, num_buffers)
        self._num_anchor_pages = num_anchor_pages
        self._is_open = not num_anchor_pages
        self._retired = pool.retired
        self._copies = PendingCopies(self.range, row_bytes, num_buffers)
        self._journal: list[PartOp] = []
        self._note: Callable[[PartOp], None] | None = None  # called with each change

    def open(self) -> bool:
        """Take the anchor's pages, before any others; False means that the pool is short."""
        if not self._is_open:
            self._is_open = self._map_anchor()
        return self._is_open

    def vacate(self) -> None:
        """Unmap all pages that were given up, after the work that may touch them."""
        self._retired.settle(self.range)

    def close(self) -> None:
        """Give the addresses back. Pre-condition: all pages but the anchor's were given up."""
        if self._is_open:
            self._anchor.give_up(range(self._num_anchor_pages))
        if self.guard is not None:
            self.guard.move_guards(())
        self.vacate()
        self.range.close()

    # --- the journal -------------------------------------------------------------------------

    def record(self, note: Callable[[PartOp], None] | None = None) -> None:
        """Begin to record all changes. Pre-condition: no page has been mapped yet.

        Args:
            note: called with each change, in place of keeping it for `take_journal`.
        """
        if self.range.num_mapped_pages > self._num_anchor_pages * self._num_buffers:
            raise InvariantError("a journal begins before the first page is mapped")
        self._note = self.pages.record = note or self._journal.append

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
        """Launch the kernel of copies over nothing, to compile or load it."""
        if self._is_open and self.range.num_mapped_pages:  # without KV, nothing ever is
            self._copies.rehearse()

    def copy_out(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Copy bytes of the range to host memory, after the work launched so far.

        Args:
            offset_bytes: offset of the first byte in the range.
            target: [bytes to copy] uint8, a part of the bytes of a `HostBuffer`, in which the
                journal counts offsets.
        """
        self._require_no_copies()
        source = self._bytes(offset_bytes, len(target))
        for host, part in in_pieces(target, source.reshape(-1)):
            host.copy_(part, non_blocking=True)
        if self._note is not None:
            host_bytes = int(target.storage_offset())
            self._note(CopiedOut(offset_bytes, host_bytes, len(target)))

    def copy_in(self, offset_bytes: int, source: torch.Tensor) -> None:
        """The opposite of `copy_out`."""
        self._require_no_copies()
        target = self._bytes(offset_bytes, len(source))
        is_whole = target.is_contiguous()
        flat = target.view(-1) if is_whole else target.new_empty(len(source))
        for host, part in in_pieces(source, flat):
            part.copy_(host, non_blocking=True)
        if not is_whole:
            target.copy_(flat.view(target.shape))
        if self._note is not None:
            host_bytes = int(source.storage_offset())
            self._note(CopiedIn(offset_bytes, host_bytes, len(source)))

    def flush(self) -> None:
        """Launch the pending copies."""
        self.make_copies()

    def _map_anchor(self) -> bool:
        return self._anchor.populate([range(self._num_anchor_pages)])

    def _require_no_copies(self) -> None:
        assert not self._copies, "pending copies come first: call make_copies"

    def _bytes(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """The bytes of a stretch, in the order in which they are kept in host memory."""
        return self.range.tensor((num_bytes,), torch.uint8, offset_bytes)
