"""Triton where there is a GPU for it, and stand-ins elsewhere: the CPU engine does without it.

Importing Triton takes 50 MB, so it is not imported where nothing would run on it.

Kernels import `triton`, `tl`, `jit`, `tensor` and `constexpr` from here. Their parameters are
annotated `constexpr` where the value is compiled in, else `tensor`: the compiler looks annotations
up, and refuses names that are not Triton's own, such as `Any`.

Overlapping launches
--------------------

With `overlap` set, a kernel starts while its predecessor on the stream still runs (programmatic
dependent launch): as soon as every program of that one has released it, or ended. All kernels of a
decode step take part, but for torch's. The rules that make it correct:

1. A program waits (`await_predecessor`) before it reads anything that kernels write, but for rule
   4, and before it writes anything. Waiting ends when the predecessor is complete and its writes
   are visible. Only a program that reads nothing but weights may do without.
2. A program releases the successor (`release_successor`) after it has waited, never before. So when
   a kernel starts, all kernels before its predecessor are complete: at most two overlap.
3. A kernel that does not wait, such as torch's, is launched without the attribute, and is then
   ordered as ever. After it, a kernel of ours may start when all programs of it have ended; that
   their writes are visible is certain only once it has waited, so rule 1 is the same.
4. What was written before the predecessor was launched may be read without waiting, by rule 2, but
   through the L2 cache (`cache_modifier=".cg"`): a multiprocessor's own cache may be older. Who
   does so says it, since the caller must then know what the predecessor writes.
5. Who writes weights launches something ordinary, or synchronises, before the next step.

Memory that is freed and used again is safe by the same rules: what a kernel writes, it writes after
all before it are complete.

The same holds in a captured graph, where these launches become programmatic edges; its first
kernel has none, and starts when all work before the graph is complete.

When to release: at once, so that the successor is in place when it may begin; or, if that would
prefetch into an L2 cache through which this kernel still streams more than fits, near the end.

Prefetching
-----------

While small kernels run, and while large ones start and end, memory is idle. So kernels before a
product fetch the first part of its weight into the L2 cache, before they wait: programs that do not
take part otherwise, or each an equal share. It changes no result and needs no order, since L2 is
where all multiprocessors see the same bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    triton: Any
    tl: Any
    constexpr: TypeAlias = Any
    tensor: TypeAlias = Any
elif torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
else:
    triton = tl = None
    constexpr = tensor = Any

interpret_on_cpu = False
"""Whether CPU tensors go through the kernels too, in Triton's interpreter; for tests, which must
set TRITON_INTERPRET=1 before anything imports Triton."""

overlap = True
"""Whether kernels start before the end of their predecessors, on devices that can (Hopper and
later). Read at each launch; a captured graph keeps it."""

prefetch_bytes = 16 << 20
"""How much of a weight to prefetch at most: a part of the L2 cache (50 MiB of an H200), about as
much as memory delivers while two small kernels run; 0 for nothing. Read like `overlap`."""

_MAX_PREFETCH_TOKENS = 256
"""With more tokens, products compute more than they read."""

_MIN_PREFETCH_BYTES = 512
"""Of a row: shorter stretches are not worth their requests."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton, the function as it is, which is then never called."""
    return function if triton is None else triton.jit(function)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on that tensor is a kernel, rather than the reference."""
    return tensor.is_cuda or interpret_on_cpu


@functools.lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has grid dependencies and bulk prefetches: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache
def count_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Of a kernel that keeps the rules above: its parameter `overlaps`, and what Triton needs."""
    if overlap and is_hopper(device):
        return {"overlaps": True, "launch_pdl": True}
    return {"overlaps": False}


def can_prefetch(weight: torch.Tensor) -> bool:
    """Whether a weight may be prefetched: its rows must lie at multiples of 16 bytes."""
    return (
        prefetch_bytes > 0
        and is_hopper(weight.device)
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] * weight.itemsize % 16 == 0
    )


def prefetch_options(weight: torch.Tensor | None, num_tokens: int) -> dict[str, Any]:
    """The parameters `ahead*` of a kernel that calls `prefetch_share` before a product.

    Where a row is too long for `prefetch_bytes`, the first columns of each row are fetched, for
    all programs of a product begin there.

    Args:
        weight: [out, in], contiguous, of the product that follows; None if there is none.
        num_tokens: its tokens.

    Returns:
        `ahead`, the weight or None for nothing to be fetched; `ahead_rows`, `ahead_columns`, what
        to fetch; `ahead_stride`, elements of a row.
    """
    if weight is None or num_tokens > _MAX_PREFETCH_TOKENS or not can_prefetch(weight):
        return {"ahead": None, "ahead_rows": 0, "ahead_columns": 0, "ahead_stride": 0}
    num_rows, num_columns = weight.shape
    row_bytes = num_columns * weight.itemsize
    part = min(row_bytes, max(prefetch_bytes // num_rows // 128 * 128, _MIN_PREFETCH_BYTES))
    return {
        "ahead": weight,
        "ahead_rows": min(num_rows, prefetch_bytes // part),
        "ahead_columns": part // weight.itemsize,
        "ahead_stride": num_columns,
    }


@jit
def await_predecessor(overlaps: constexpr) -> None:
    """Until the kernel before this one is complete; see the rules above."""
    if overlaps:
        tl.extra.cuda.gdc_wait()


@jit
def release_successor(overlaps: constexpr) -> None:
    """Let the kernel after this one start, once all programs have come to this or ended."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch_stretches(pointers: tensor, num_elements: tensor, wanted: tensor) -> None:
    """Begin to fetch some elements from each pointer into L2, where `wanted` (int1).

    Pointers and sizes in bytes are multiples of 16. The stretches of a warp are begun one after the
    other, in about 30 cycles each: they should be long.
    """
    item_bytes: constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $3, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers, num_elements * item_bytes, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def prefetch_points(pointers: tensor, wanted: tensor) -> None:
    """Begin to fetch the 64 bytes around each pointer into L2, where `wanted` (int1).

    It may be more: how much is fetched for an address is the device's choice.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            @wanted prefetch.global.L2 [$1];
            mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [pointers, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def lanes(threads: constexpr) -> tensor:
    """[threads]: a number for each thread, low numbers being spread over all warps."""
    thread = tl.arange(0, threads)
    return thread % 32 * (threads // 32) + thread // 32


@jit
def prefetch_share(
    ahead: tensor,
    ahead_rows: tensor,
    ahead_columns: tensor,
    ahead_stride: tensor,
    program: tensor,
    num_programs: tensor,
    threads: constexpr,
) -> None:
    """Fetch this program's share of what `prefetch_options` has found: every n-th row."""
    if ahead is not None:
        for first in range(program, ahead_rows, num_programs * threads):
            row = first + lanes(threads) * num_programs
            pointers = ahead + row.to(tl.int64) * ahead_stride
            prefetch_stretches(pointers, ahead_columns, row < ahead_rows)
