"""vAttention's library (Prabhu et al., section 5.3, Table 3): KV tensors for any attention kernel.

    import torch
    from aquifer import vattention

    with vattention.init(32, 64, 8192, kv_heads=8, head_dim=128, dtype=torch.bfloat16) as kv:
        reqid = kv.alloc_reqid()
        lengths = [0] * kv.max_batch
        lengths[reqid] = 1000                   # tokens that have KV after the next forward pass
        if not kv.step(lengths):                # memory is short: end or postpone a request
            ...
        keys, values = kv[0]                    # of layer 0: [max_batch, max_length, 8, 128]
        keys[reqid, :1000] = ...                # a plain tensor, also for a kernel
        kv.free_reqid(reqid)

The tensors have addresses for every request of the full length, and pages only under the tokens
that `step` was told of. So a kernel that knows nothing of pages runs on them, and changing it is
changing one call. `examples/vattention.py` serves a model of Transformers in this way.

It needs nothing of Aquifer's engine: a pool of pages and the manager of contiguous KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from numbers import Integral
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.virtual import VirtualCache
from aquifer.errors import CapacityError, ConfigError
from aquifer.memory.driver import open_driver
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.stock import PageStocker
from aquifer.sizes import format_size, parse_size

_SHARE_OF_FREE = 0.9  # of the device's memory, where no budget is given


def init(
    layers: int,
    max_batch: int,
    max_length: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int | str | None = None,
    *,
    device: str = "auto",
    memory: int | str | None = None,
    overlap: bool = True,
    deferred: bool = True,
    eager_pages: int = 8,
    reclaim_below: float = 0.1,
    prompt_page_size: int | str | None = None,
    kv_layout: Literal["token-major", "layer-major"] = "token-major",
) -> VAttention:
    """Reserve KV tensors without memory under them.

    Args:
        layers: layers with KV.
        max_batch: requests at once.
        max_length: tokens of the longest request.
        kv_heads: heads of keys and values of a layer.
        head_dim: elements of a head.
        dtype: of the KV.
        page_size: size of a physical page, in bytes or as "2MiB"; None for the device's own.
        device: "cpu", "cuda", "cuda:N" or "auto".
        memory: the most that pages may take; None for nine tenths of what is free.
        overlap: map pages for the next step in a background thread (section 5.4.2), not in `step`.
        deferred: leave the pages of a request that has ended to the next one in its place.
        eager_pages: pages to keep mapped for the next request; 0 for none.
        reclaim_below: unmap the pages of ended requests once less than this share of the memory is
            free beside them.
        prompt_page_size: size of the largest pages for what a prompt fills; None for the device's
            size of large pages. Token-major only.
        kv_layout: "token-major", or "layer-major" for the paper's 2 x layers buffers.

    Raises:
        ConfigError: a size does not fit the device.
        DriverError: the device is missing, or has no addresses for the tensors.
    """
    numbers: dict[str, Any] = {
        "layers": layers,
        "max_batch": max_batch,
        "max_length": max_length,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    for name, number in numbers.items():
        if not isinstance(number, Integral) or number < 1:
            raise ConfigError(f"{name} is {number!r}; it must be a whole number of at least 1")
    if kv_layout not in ("token-major", "layer-major"):
        raise ConfigError(f"kv_layout is {kv_layout!r}; choose token-major or layer-major")
    if kv_layout == "layer-major" and prompt_page_size is not None:
        raise ConfigError("prompt_page_size is for token-major; leave it out with layer-major")
    if eager_pages < 0:
        raise ConfigError(f"eager_pages is {eager_pages}; it must be at least 0")
    if not 0 <= reclaim_below <= 1:
        raise ConfigError(f"reclaim_below is {reclaim_below}; it must be from 0 to 1")
    sizes = {"page_size": page_size, "memory": memory, "prompt_page_size": prompt_page_size}
    for name, size in sizes.items():
        if size is not None and parse_size(size) < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")
    with ExitStack() as resources:
        driver = open_driver(device)
        resources.callback(driver.close)
        page_bytes = parse_size(page_size or 0) or driver.default_page_bytes
        if page_bytes % driver.granularity_bytes:
            raise ConfigError(
                f"page_size is {format_size(page_bytes)}; it must be a multiple of "
                f"{format_size(driver.granularity_bytes)} on {driver.device}"
            )
        large_bytes = parse_size(prompt_page_size or 0) or max(driver.large_page_bytes, page_bytes)
        if large_bytes % page_bytes:
            raise ConfigError(
                f"prompt_page_size is {format_size(large_bytes)}; it must be a multiple of "
                f"page_size, {format_size(page_bytes)}"
            )
        budget_bytes = parse_size(memory or 0) or int(driver.available_bytes() * _SHARE_OF_FREE)
        if budget_bytes < page_bytes:
            raise ConfigError(
                f"memory is {format_size(budget_bytes)}; it must be at least a page, "
                f"{format_size(page_bytes)}"
            )
        pool = PagePool(driver, budget_bytes, page_bytes)
        resources.callback(pool.close)
        pool.retired.defers = deferred
        if overlap:
            pool.mapper = BackgroundMapper(pool.pages)
            resources.callback(pool.mapper.close)
        stocker = PageStocker(pool, reclaim_below=reclaim_below)
        stocker.start()
        resources.callback(stocker.close)
        layout = KVLayout((LayerKV(kv_heads, head_dim, head_dim),) * layers, dtype)
        mapping = MappingOptions(
            large_bytes if large_bytes > page_bytes else None,
            eager_pages=eager_pages if deferred else 0,
            is_layer_major=kv_layout == "layer-major",
        )
        owner = Owner("vattention", Kind.KV)
        cache = VirtualCache(pool, owner, layout, max_batch, max_length, mapping)
        resources.callback(cache.close)
        return VAttention(cache, pool, stocker, max_batch, max_length, resources.pop_all())


class VAttention(Sequence[tuple[torch.Tensor, torch.Tensor]]):
    """KV tensors of all layers, and the calls of Table 3 that put memory under them.

    `kv[layer]` are the keys and the values, [max_batch, max_length, kv_heads, head_dim] each, of
    which the last two dimensions are contiguous. Only the tokens that `step` was told of may be
    touched; all else has no memory, and touching it is a fault.

    One thread makes all calls. Kernels may still be running when a request is freed.

    Attributes:
        max_batch: requests at once.
        max_length: tokens of the longest request.
    """

    def __init__(
        self,
        cache: VirtualCache,
        pool: PagePool,
        stocker: PageStocker,
        max_batch: int,
        max_length: int,
        resources: ExitStack,
    ) -> None:
        self.max_batch = max_batch
        self.max_length = max_length
        self._cache = cache
        self._pool = pool
        self._stocker = stocker
        self._resources = resources
        # The first row is the anchor's: see `KVShape`.
        self._layers = [(keys[1:], values[1:]) for keys, values in cache.tensors.layers]
        self._free = list(range(max_batch))
        self._is_closed = False

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Keys and values of a layer."""
        return self._layers[layer]

    def alloc_reqid(self, prompt_length: int = 1) -> int:
        """Begin a request: an index in the first dimension of all tensors.

        Args:
            prompt_length: tokens that it begins with, so that what they fill gets large pages.

        Raises:
            CapacityError: `max_batch` requests run already.
            ConfigError: the prompt is too long, or the tensors are closed.
        """
        self._check_open()
        if not 0 <= prompt_length <= self.max_length:
            raise ConfigError(
                f"prompt_length is {prompt_length}; it must be from 0 to {self.max_length}, the "
                "length of init"
            )
        if not self._free:
            raise CapacityError(
                f"{self.max_batch} requests run already; free one, or init for more"
            )
        slots = [reqid + 1 for reqid in self._free]
        slot = self._cache.preferred_slot((), slots) or min(slots)
        self._free.remove(slot - 1)
        self._cache.expect(slot, prompt_length, self.max_length + 1)
        return slot - 1

    def free_reqid(self, reqid: int) -> None:
        """End a request. Kernels that were launched already may still read its KV.

        Raises:
            ConfigError: there is no such request, or the tensors are closed.
        """
        self._check(reqid)
        self._cache.release(reqid + 1)
        self._free.append(reqid)

    def step(self, lengths: Sequence[int]) -> bool:
        """Put memory under the tokens of the next forward pass.

        A request keeps the memory that it has if its length is less than before.

        Args:
            lengths: [max_batch], tokens of each request that have KV after that pass; 0 for those
                that do not run.

        Returns: True if all have memory. False if there is too little, where the paper's call
            returns -1: then none has got any, and a request has to end or wait.

        Raises:
            ConfigError: a length is no whole number, too long, or of a request that does not run;
                or the tensors are closed.
            DriverError: the device refused.
        """
        self._check_open()
        given = np.asarray(lengths)
        if given.dtype.kind not in "iu":
            raise ConfigError(f"lengths holds {given.dtype} elements; it must hold whole numbers")
        wanted = given.astype(np.int64)
        if wanted.shape != (self.max_batch,):
            raise ConfigError(f"lengths has shape {wanted.shape}; it must be ({self.max_batch},)")
        if len(wanted) and (wanted.min() < 0 or wanted.max() > self.max_length):
            raise ConfigError(f"lengths must be from 0 to {self.max_length}, the length of init")
        running = np.flatnonzero(wanted)
        for reqid in set(running.tolist()).intersection(self._free):
            raise ConfigError(f"request {reqid} was not allocated; call alloc_reqid first")
        is_done = self._cache.reserve(running + 1, wanted[running])
        self._cache.upload()
        if self._pool.mapper is not None:
            self._pool.mapper.begin()
        self._stocker.wake()
        return is_done

    @property
    def mapped_bytes(self) -> int:
        """Memory under the tensors of running requests."""
        return self._cache.stats(0).mapped_bytes

    @property
    def num_driver_calls(self) -> dict[Literal["step", "background"], int]:
        """Calls of the device's driver so far: by this thread, and by those in the background."""
        pages = self._pool.pages
        return {"step": pages.num_foreground_calls, "background": pages.num_background_calls}

    def close(self) -> None:
        """Give all memory and addresses back; the tensors must not be used any more."""
        self._is_closed = True
        self._resources.close()

    def __enter__(self) -> VAttention:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the tensors are closed; call init for others")

    def _check(self, reqid: int) -> None:
        self._check_open()
        if not 0 <= reqid < self.max_batch or reqid in self._free:
            raise ConfigError(f"request {reqid} does not run")
