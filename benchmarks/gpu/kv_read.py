"""How fast KV can be read in each layout, by a kernel that does nothing else: the floor of decode
attention.

    python benchmarks/gpu/kv_read.py --output benchmarks/gpu/kv_read.json

KV has the shape of Llama-3-8B's: 32 layers, K and V of 8 heads of 128. A call reads one layer of
all tokens, and calls of all layers are captured in one CUDA graph, so that nothing is left in the
L2 cache from the last replay. Several numbers of programs are tried; the fastest counts. The
layouts:

- token-major: all layers of a token lie side by side;
- token-major with so many bytes of padding behind each token;
- layer-major: all keys of a layer lie side by side, and all values.

A call waits for the one before, as attention does for its query, or not ("at once").
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench.floor import device_copy_bandwidth
from aquifer.bench.result import save
from aquifer.bench.timing import captured_seconds
from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    count_multiprocessors,
    jit,
    launch_options,
    release_successor,
    tensor,
    tl,
)

DEVICE = torch.device("cuda")
NUM_LAYERS = 32
PART_BYTES = 8 * 128 * 2  # of the keys of a token, or of the values
WORD_BYTES = 4
SHAPES = ((1, 8192), (4, 16384), (16, 16384))  # sequences, tokens of each
PADDING_BYTES = (0, 256, 2048)
PROGRAMS_PER_MULTIPROCESSOR = (1, 2, 4, 8)
TILE_TOKENS = 4
NUM_WARPS = 8
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the keys and values of a layer lie, in bytes."""

    name: str
    token_bytes: int  # from a token to the next
    layer_bytes: int  # from a layer to the next
    part_bytes: int  # from keys to values
    total_bytes: int


def layouts(num_tokens: int) -> Iterator[Layout]:
    """All layouts of so many tokens."""
    layer_bytes = 2 * PART_BYTES
    for padding in PADDING_BYTES:
        token_bytes = NUM_LAYERS * layer_bytes + padding
        name = f"token-major, {padding} bytes of padding" if padding else "token-major"
        yield Layout(name, token_bytes, layer_bytes, PART_BYTES, num_tokens * token_bytes)
    part_bytes = num_tokens * PART_BYTES
    yield Layout("layer-major", PART_BYTES, 2 * part_bytes, part_bytes, 2 * NUM_LAYERS * part_bytes)


@jit
def _read_kernel(
    kv: tensor,
    out: tensor,
    num_tokens: tensor,
    token_words: tensor,
    part_offset: tensor,
    part_words: constexpr,
    tile_tokens: constexpr,
    waits: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program reads its share of the tokens, and stores the sum of all words."""
    if waits:
        await_predecessor(overlaps)
    release_successor(overlaps)
    share = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, num_tokens)
    word = tl.arange(0, part_words)[None, :]
    token = tl.arange(0, tile_tokens)
    sums = tl.zeros([tile_tokens, part_words], tl.int32)
    for start in range(begin, end, tile_tokens):
        inside = (start + token < end)[:, None]
        keys = kv + (start + token).to(tl.int64)[:, None] * token_words + word
        # Read once, so not to be kept.
        sums += tl.load(keys, mask=inside, other=0, eviction_policy="evict_first")
        sums += tl.load(keys + part_offset, mask=inside, other=0, eviction_policy="evict_first")
    if not waits:
        await_predecessor(overlaps)
    tl.store(out + tl.program_id(0), tl.sum(sums))


def measure(kv: torch.Tensor, layout: Layout, num_tokens: int, *, waits: bool) -> dict[str, Any]:
    """Read KV with each number of programs; the fastest.

    Args:
        kv: [words] int32, at least the layout's.
        layout: where what is.
        num_tokens: of all sequences.
        waits: whether a call waits for the one before.
    """
    found: dict[int, float] = {}
    for each in PROGRAMS_PER_MULTIPROCESSOR:
        num_programs = each * count_multiprocessors(DEVICE)
        out = torch.empty(num_programs, dtype=torch.int32, device=DEVICE)

        def run(num_programs: int = num_programs, out: torch.Tensor = out) -> None:
            for layer in range(NUM_LAYERS):
                _read_kernel[(num_programs,)](
                    kv[layer * layout.layer_bytes // WORD_BYTES :],
                    out,
                    num_tokens,
                    layout.token_bytes // WORD_BYTES,
                    layout.part_bytes // WORD_BYTES,
                    part_words=PART_BYTES // WORD_BYTES,
                    tile_tokens=TILE_TOKENS,
                    waits=waits,
                    num_warps=NUM_WARPS,
                    **launch_options(DEVICE),
                )

        found[num_programs] = statistics.median(captured_seconds(run, REPLAYS)) / NUM_LAYERS
        last = kv[(NUM_LAYERS - 1) * layout.layer_bytes // WORD_BYTES :]
        assert int(out.sum()) == _sum(last, layout, num_tokens), "not all was read"
    best = min(found, key=lambda count: found[count])
    return {"layout": asdict(layout), "waits": waits, "num_programs": best, "layer_s": found[best]}


def _sum(layer: torch.Tensor, layout: Layout, num_tokens: int) -> int:
    """Sum of all words of a layer."""
    words = PART_BYTES // WORD_BYTES
    size, stride = (num_tokens, words), (layout.token_bytes // WORD_BYTES, 1)
    parts = [layer.as_strided(size, stride), layer.as_strided(size, stride, _offset(layer, layout))]
    return sum(int(part.sum()) for part in parts)


def _offset(layer: torch.Tensor, layout: Layout) -> int:
    """Where the values of a layer begin in its storage, in words."""
    return int(layer.storage_offset()) + layout.part_bytes // WORD_BYTES


def main() -> None:
    """Measure all shapes and layouts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name(DEVICE)
    copy_rate = device_copy_bandwidth()
    torch.cuda.empty_cache()
    most_bytes = max(each.total_bytes for n, t in SHAPES for each in layouts(n * t))
    kv = torch.randint(0, 8, (most_bytes // WORD_BYTES,), dtype=torch.int32, device=DEVICE)
    console = Console()
    table = Table(title=f"{gpu}, copy {copy_rate / 1e9:.0f} GB/s: us a layer, % of the copy rate")
    for column in ("sequences x tokens", "layout", "waits", "at once"):
        table.add_column(column, justify="right")
    results = []
    for num_seqs, tokens in SHAPES:
        floor_s = num_seqs * tokens * 2 * PART_BYTES / copy_rate
        for layout in layouts(num_seqs * tokens):
            cells = []
            for waits in (True, False):
                result = measure(kv, layout, num_seqs * tokens, waits=waits)
                results.append({"sequences": num_seqs, "tokens": tokens, **result})
                seconds = result["layer_s"]
                cells.append(f"{seconds * 1e6:.1f}, {floor_s / seconds:.0%}")
            table.add_row(f"{num_seqs} x {tokens}", layout.name, *cells)
    console.print(table)
    save(arguments.output, {"gpu": gpu, "copy_bytes_per_s": copy_rate, "results": results})


if __name__ == "__main__":
    main()
