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
   are visible.
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

When to release: at once, so that the successor is in place when it may begin. A kernel that streams
for long does so only after its main loop, by measurement: else the successor's programs would take
registers and shared memory of multiprocessors meanwhile.

Fetching the next weight into the L2 cache while small kernels run was tried and left out: in the
engine, a step of one row of a 0.6B model took 2 % less time, and all others, of that and of an 8B
model, up to 5 % more (benchmarks/gpu/decode_step_prefetch.json has the smaller one's kernels alone:
7 % less for one row, 7 % more for 128).

Compiling
---------

Triton compiles a kernel when it is first launched, and keeps the result on disk. Its version 3.6
then has the C compiler make a launcher for each list of argument types, which takes nearly as long.
One by one that is most of a first start; `compiled_together` does it in threads. The C compiler and
`ptxas` are processes of their own, and the passes over a kernel give up the interpreter's lock: it
is held for about a quarter of the time that all this takes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

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


_modules: set[str] = set()
"""Where there are kernels of ours."""

_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton, the function as it is, which is then never called."""
    return jit_once()(function)


def jit_once(
    *, counts: Sequence[str] = (), indices: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """`jit` of a kernel that is not to be compiled anew as steps change.

    Triton does so where a number is 1 or a multiple of 16, or an address is one.

    Args:
        counts: parameters that are such numbers, as of rows.
        indices: parameters that are tensors which may begin anywhere within others.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return function
        _modules.add(function.__module__)
        return triton.jit(
            function, do_not_specialize=list(counts), do_not_specialize_on_alignment=list(indices)
        )

    return decorate


class _Zeros(TorchFunctionMode):
    """Tensors that nobody has written yet are zero."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Compile at the end, in parallel, what is launched meanwhile.

    In the body, a kernel of ours that is not compiled yet is not launched: its outputs remain as
    they were. So that what reads them finds valid indices, tensors of `torch.empty` are zero. The
    body is thus to be a step whose results nobody wants; all else it does, it does for real, and
    so do other threads. Without a GPU nothing of this happens.

    An error of the compiler comes up when the kernel is launched.

    Args:
        device: that kernels run on.
    """
    if device.type != "cuda":
        yield
        return
    wanted: dict[str, Any] = {}  # a kernel by the description of one variant of it
    body = threading.get_ident()

    def note(**launch: Any) -> bool:
        """Called by Triton before it compiles; whether it should do without."""
        if threading.get_ident() != body or launch["fn"].module not in _modules:
            return False
        wanted.setdefault(launch["compile"]["specialization_data"], launch["fn"].jit_function)
        return True

    hooks = triton.knobs.runtime
    before, hooks.jit_cache_hook = hooks.jit_cache_hook, note
    try:
        with _Zeros():
            yield
    finally:
        hooks.jit_cache_hook = before

    def prepare(description: str) -> None:
        # The launcher is made, and the kernel brought to the device, when `run` is first asked for.
        _ = wanted[description].preload(description).run

    if not wanted:
        return
    start_compiler(device).join()
    with ThreadPoolExecutor(
        thread_name_prefix="compile", initializer=torch.cuda.set_device, initargs=(device,)
    ) as threads:
        for description in wanted:
            threads.submit(prepare, description)


@jit
def _empty_kernel() -> None:
    """Does nothing."""


@functools.cache
def start_compiler(device: torch.device) -> threading.Thread:
    """Have a thread do what Triton does once in a process, before its first kernel.

    It hashes its own sources, which every thread that compiles at that moment would do by itself,
    and makes a module of its own with the C compiler: most of a second, while weights are loaded.

    Args:
        device: that kernels will run on.
    """

    def compile_nothing() -> None:
        torch.cuda.set_device(device)
        _ = _empty_kernel.warmup(grid=(1,)).run

    thread = threading.Thread(target=compile_nothing, name="compile", daemon=True)
    thread.start()
    return thread


MIN_DOT = 16
"""The smallest side of a matrix product in Triton."""


def pow2(number: int, at_least: int = 1) -> int:
    """The next power of two: what Triton's blocks must be."""
    return max(1 << (number - 1).bit_length(), at_least)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on that tensor is a kernel, rather than the reference."""
    return tensor.is_cuda or interpret_on_cpu


@functools.lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has grid dependencies: from Hopper on."""
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
