"""Reserved addresses, mapped page by page, and tensors over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Driver, Handle


class VirtualRange:
    """A stretch of addresses in which pages of one size come and go.

    The range knows which page is at which index; whose the pages are is the pool's business, so
    mapping takes pages that the caller has acquired, and unmapping returns them to the caller.

    Args:
        driver: the device.
        num_bytes: how much to reserve; rounded up to whole pages.
        page_bytes: size of the pages to be mapped.
        address: the start of a stretch that somebody else has reserved and will give back; by
            default the range reserves its own.

    Raises:
        DriverError: the addresses could not be reserved.
    """

    def __init__(
        self, driver: Driver, num_bytes: int, page_bytes: int, address: int | None = None
    ) -> None:
        self.driver = driver
        self.page_bytes = page_bytes
        self.num_pages = max(-(-num_bytes // page_bytes), 1)
        self.num_bytes = self.num_pages * page_bytes
        self._is_own = address is None
        self.address = driver.reserve(self.num_bytes) if address is None else address
        self._handles: dict[int, Handle] = {}  # page index -> page

    @property
    def num_mapped_pages(self) -> int:
        """Pages mapped now."""
        return len(self._handles)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped now."""
        return len(self._handles) * self.page_bytes

    def map(self, index: int, handles: Sequence[Handle]) -> None:
        """Map pages at [index, index + len(handles)), all or none.

        Raises:
            DriverError: the device refused; nothing was mapped.
        """
        if index < 0 or index + len(handles) > self.num_pages:
            raise InvariantError(f"pages [{index}, {index + len(handles)}) leave the range")
        indices = range(index, index + len(handles))
        if not self._handles.keys().isdisjoint(indices):
            raise InvariantError(f"a page of [{index}, {index + len(handles)}) is mapped already")
        self.driver.map(self.address + index * self.page_bytes, handles)
        self._handles.update(zip(indices, handles, strict=True))

    def handles(self, index: int, count: int) -> list[Handle]:
        """The pages at [index, index + count): map them elsewhere to alias this stretch."""
        return self.handles_at(range(index, index + count))

    def handles_at(self, indices: Iterable[int]) -> list[Handle]:
        """The pages at these indices."""
        try:
            return [self._handles[i] for i in indices]
        except KeyError as error:
            raise InvariantError(f"page {error} of a range is not mapped") from None

    def unmap(self, index: int, count: int) -> list[Handle]:
        """Unmap [index, index + count) and return the pages, which the caller still holds."""
        handles = self.handles(index, count)
        if count:
            self.driver.unmap(self.address + index * self.page_bytes, self.page_bytes, count)
            for i in range(index, index + count):
                del self._handles[i]
        return handles

    def unmap_at(self, indices: Sequence[int]) -> list[Handle]:
        """Unmap the pages at these indices, in ascending order, and return them likewise."""
        if indices and indices[-1] - indices[0] == len(indices) - 1:  # one stretch, as most are
            return self.unmap(indices[0], len(indices))
        handles: list[Handle] = []
        start = 0
        while start < len(indices):
            end = start + 1
            while end < len(indices) and indices[end] == indices[end - 1] + 1:
                end += 1
            handles += self.unmap(indices[start], end - start)
            start = end
        return handles

    def unmap_all(self) -> list[Handle]:
        """Unmap whatever is mapped and return those pages."""
        return self.unmap_at(sorted(self._handles))

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        offset_bytes: int = 0,
        stride: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor over the range's addresses, mapped or not; `stride` is in elements.

        The tensor is a window: it keeps nothing mapped, and touching an unmapped page through it
        is a fault. It must not outlive the range.
        """
        if stride is None:
            stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if shape else 0
        if offset_bytes < 0 or offset_bytes + (last + 1) * dtype.itemsize > self.num_bytes:
            raise InvariantError(f"a tensor of {list(shape)} {dtype} leaves the range")
        if offset_bytes % dtype.itemsize:
            raise InvariantError(f"{offset_bytes} bytes are no whole number of {dtype}")
        flat = self.driver.view(self.address, self.num_bytes).view(dtype)
        return flat.as_strided(list(shape), list(stride), offset_bytes // dtype.itemsize)

    def close(self) -> None:
        """Give back addresses of its own. Pre-condition: nothing is mapped."""
        if self._handles:
            raise InvariantError(f"{len(self._handles)} pages are still mapped in this range")
        if self._is_own:
            self.driver.free(self.address, self.num_bytes)
