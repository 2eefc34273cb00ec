"""Attention kernels over KV on pages that are mapped in a shuffled order, and part `page_sizes`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.vattention import paper
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import KIB, SEED, Settings, Shape

from aquifer.bench.floor import device_copy_bandwidth, read_bandwidth
from aquifer.bench.result import summarize
from aquifer.bench.timing import replay_seconds
from aquifer.kernels.decode_attention import DecodeWorkspaces, decode_attention
from aquifer.kernels.prefill_attention import PrefillSpans, prefill_attention
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.base import Driver
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.range import VirtualRange

BLOCK_SIZE = 16
"""Tokens of a block of the paged layout."""

_CREATED_PAGES = 256  # of a call
_PREFILL_LAYERS = 2  # layers of a long prompt that are timed
_LONG_TOKENS = 32768
_LONG_REPEATS = 2
_WARM_UPS = 2  # replays of a graph

LayerKV = tuple[torch.Tensor, torch.Tensor]


class MappedKV:
    """Token-major KV of all layers, random, on pages of one size in a random order.

    Args:
        driver: memory driver of the device.
        settings: heads, layers and data type.
        batch: sequences.
        tokens: of each; a multiple of `BLOCK_SIZE`.
        page_bytes: size of a page.
    """

    def __init__(
        self, driver: Driver, settings: Settings, batch: int, tokens: int, page_bytes: int
    ) -> None:
        _, num_kv_heads, head_dim = settings.heads
        shape = (batch, tokens, settings.num_layers, 2, num_kv_heads, head_dim)
        num_bytes = settings.dtype.itemsize
        for size in shape:
            num_bytes *= size
        self._table = PageTable(driver, page_bytes)
        self._range = VirtualRange(self._table, num_bytes, page_bytes)
        pages: list[Page] = []
        while len(pages) < self._range.num_pages:
            count = min(self._range.num_pages - len(pages), _CREATED_PAGES)
            pages += self._table.create(page_bytes, count)
        random.Random(SEED).shuffle(pages)
        for index, page in enumerate(pages):
            self._range.map(index, [page])
        self.kv = self._range.tensor(shape, settings.dtype)
        for sequence in self.kv:
            sequence.normal_()

    def layer(self, index: int, *, paged: bool) -> LayerKV:
        """Keys and values of a layer, [slots, tokens, ...] or [blocks, 16, kv_heads, dim]."""
        kv = self.kv[:, :, index]
        if paged:
            kv = kv.unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1)
        keys, values = kv.unbind(2)
        return keys, values

    def close(self) -> None:
        """Give back pages and addresses."""
        pages = self._range.unmap(range(self._range.num_pages))
        self._table.release(pages)
        self._range.close()


@contextmanager
def mapped_kv(
    settings: Settings, batch: int, tokens: int, page_bytes: int | None = None
) -> Iterator[MappedKV]:
    """KV on pages for the time of the context; by default, pages are those of the engines."""
    driver = open_driver(settings.device)
    try:
        kv = MappedKV(driver, settings, batch, tokens, page_bytes or settings.page_bytes)
        yield kv
        if settings.on_gpu:
            torch.cuda.synchronize()
        kv.close()
    finally:
        driver.close()


class Attention:
    """Our kernels for one shape.

    Args:
        settings: heads, layers and data type.
        shape: rows that decode, or a chunk.
        kv: KV of all sequences.
        paged: through block tables, in place of contiguous addresses.
    """

    def __init__(self, settings: Settings, shape: Shape, kv: MappedKV, *, paged: bool) -> None:
        num_heads, _, head_dim = settings.heads
        device = torch.device(settings.device)
        self._shape, self._kv, self._paged = shape, kv, paged
        self._scale = head_dim**-0.5
        rows = shape.batch * shape.chunk_tokens
        options: dict[str, Any] = {"dtype": settings.dtype, "device": device}
        self._query = torch.randn(rows, num_heads, head_dim, **options)
        self._out = torch.empty_like(self._query)
        self._tables: torch.Tensor | None = None
        if paged:
            # The blocks of a sequence are anywhere.
            num_blocks = shape.batch * shape.tokens // BLOCK_SIZE
            self._tables = torch.randperm(num_blocks, device=device).view(shape.batch, -1).int()
        self._slots = torch.randperm(shape.batch, device=device)
        self._lengths = torch.full((shape.batch,), shape.tokens, device=device)
        starts = [shape.tokens - shape.chunk_tokens] * shape.batch
        offsets = [i * shape.chunk_tokens for i in range(shape.batch + 1)]
        self._spans = PrefillSpans.of([*range(shape.batch)], starts, offsets, device)
        self._workspaces = DecodeWorkspaces()

    def run(self, layer: int) -> None:
        """Compute the attention of a layer."""
        keys, values = self._kv.layer(layer, paged=self._paged)
        if self._shape.chunk_tokens > 1:
            prefill_attention(
                self._query, keys, values, self._tables, self._spans, self._out, scale=self._scale
            )
            return
        workspace, config = self._workspaces.get(self._query, values, paged=self._paged)
        decode_attention(
            self._query,
            keys,
            values,
            self._tables,
            self._slots,
            self._lengths,
            self._out,
            workspace,
            config,
            scale=self._scale,
        )


def layer_seconds(settings: Settings, shape: Shape, run: Callable[[int], None]) -> list[float]:
    """Seconds of one layer's attention, the mean over layers, for each repeat.

    Decode steps are replayed from a CUDA graph, so that no launch is in the figure. A prompt's
    kernels take longer than their launches.

    Args:
        settings: device, layers and repeats.
        shape: what is computed.
        run: computes a layer.
    """
    num_layers, repeats = settings.num_layers, settings.repeats
    if shape.tokens >= _LONG_TOKENS and shape.chunk_tokens > 1:
        num_layers, repeats = _PREFILL_LAYERS, _LONG_REPEATS

    def layers() -> None:
        for layer in range(num_layers):
            run(layer)

    layers()
    if not settings.on_gpu:
        seconds = [_seconds(layers) for _ in range(repeats)]
    elif shape.chunk_tokens == 1:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        seconds = replay_seconds(graph, repeats + _WARM_UPS)[_WARM_UPS:]
    else:
        seconds = [_device_seconds(layers) for _ in range(repeats)]
    return [each / num_layers for each in seconds]


def _seconds(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _device_seconds(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def kernel_figures(settings: Settings, shape: Shape, layer_s: list[float]) -> dict[str, Any]:
    """Time, bytes and operations of one shape, for the result's file."""
    num_heads, num_kv_heads, head_dim = settings.heads
    start = shape.tokens - shape.chunk_tokens
    pairs = shape.batch * shape.chunk_tokens * (start + (shape.chunk_tokens + 1) / 2)
    kv_bytes = shape.batch * shape.tokens * 2 * num_kv_heads * head_dim * settings.dtype.itemsize
    median_s = summarize(layer_s)["median"]
    return {
        "shape": {"name": shape.name, **asdict(shape)},
        "layer_s": layer_s,
        "layer_us": 1e6 * median_s,
        "all_layers_s": median_s * settings.num_layers,
        "gb_per_s": kv_bytes / median_s / 1e9,
        "tflop_per_s": 4 * pairs * num_heads * head_dim / median_s / 1e12,
    }


def measure_kernel(
    settings: Settings, shape: Shape, *, paged: bool, page_bytes: int | None = None
) -> dict[str, Any]:
    """Measure one of our kernels for a shape, over pages of a size."""
    with (
        torch.inference_mode(),
        mapped_kv(settings, shape.batch, shape.tokens, page_bytes) as kv,
    ):
        attention = Attention(settings, shape, kv, paged=paged)
        layer_s = layer_seconds(settings, shape, attention.run)
    return kernel_figures(settings, shape, layer_s)


def copy_bandwidth(settings: Settings) -> float:
    """Bytes a second of a copy on the GPU, read and written; on the CPU, of reading."""
    if not settings.on_gpu:
        return read_bandwidth()
    rate = device_copy_bandwidth()
    torch.cuda.empty_cache()
    return rate


def page_sizes(settings: Settings, record: Record) -> None:
    """Measure decode and prefill attention by the size of the pages under KV (Fig. 11)."""
    record.content["paper"] = paper.PAGE_SIZES
    cells = {
        f"{shape.name}, {size // KIB} KiB": (shape, size)
        for shape in settings.shapes
        for size in settings.page_sizes
    }
    for _, (shape, page_bytes) in record.cells(cells):
        figures = measure_kernel(settings, shape, paged=False, page_bytes=page_bytes)
        record.add("rows", {"page_kib": page_bytes // KIB, **figures})
