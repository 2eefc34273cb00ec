"""Triton where there is a GPU, and stand-ins elsewhere: the CPU engine does not need Triton.

Importing Triton takes 50 MB, so it is not imported where no kernel would run.

Kernels import `triton`, `tl`, `jit`, `tensor` and `constexpr` from here. A kernel parameter is
annotated `constexpr` if its value is compiled in, else `tensor`: the compiler looks annotations up,
and refuses names that are not Triton's own, such as `Any`.

Overlapping launches
--------------------

With `overlap` set, a kernel starts while its predecessor on the stream still runs (programmatic
dependent launch, PDL): as soon as every program of the predecessor has released it or ended. All
kernels of a decode step take part, except torch's. The rules that make it correct:

1. A program waits (`await_predecessor`) before it writes anything, and before it reads anything
   that kernels write (except by rules 4 and 6). The wait ends when the predecessor is complete and
   its writes are visible.
2. A program releases the successor (`release_successor`) after it has waited, never before (except
   by rule 6). So when a kernel starts, all kernels before its predecessor are complete: at most two
   overlap.
3. A kernel that does not wait, such as torch's, is launched without the attribute and is ordered
   as usual. A kernel of ours after it may start when all programs of it have ended; their writes
   are certainly visible only after the wait, so rule 1 holds here too.
4. By rule 2, data written before the predecessor was launched may be read without waiting, but
   through the L2 cache (`cache_modifier=".cg"`): an SM's L1 cache may be stale. A function that
   does so documents it, since its caller must know what the predecessor writes.
5. Code that writes weights launches a kernel without the attribute, or synchronises, before the
   next step.
6. A kernel may run beside its predecessor, if neither reads or writes what the other writes. It
   waits at its end in place of its begin, so whatever waits for it waits for both. It starts when
   the predecessor has waited, and so reads what earlier kernels have written, through the L2 cache.
   It releases early: then its successor starts while both may run, and by rule 4 reads nothing that
   either of them writes.

Memory that is freed and reused is safe by the same rules: a kernel writes only after all kernels
before it are complete.

The same holds in a captured CUDA graph, where these launches become programmatic edges; its first
kernel has none, and starts when all work before the graph is complete.

When to release: at once, so that the successor's programs are resident when it may begin. By
measurement, a kernel that streams for long releases only after its main loop: otherwise the
successor's programs would occupy registers and shared memory of the SMs meanwhile.

A kernel that waits may have the first tiles of its weight fetched into the L2 cache meanwhile
(`prefetch`), in amounts found by measurement. Small kernels that fetch the weight of the next were
tried and left out: in the engine, a step of one row of a 0.6B model took 2 % less time, and all
others, of that and of an 8B model, up to 5 % more (benchmarks/gpu/decode_step_prefetch.json has the
smaller one's kernels alone: 7 % less for one row, 7 % more for 128).

Compilation
-----------

Triton compiles a kernel at its first launch, and caches the result on disk. Its version 3.6 then
has the C compiler build a launcher for each list of argument types, which takes nearly as long.
One by one that is most of a first start; `compiled_together` compiles in threads. The C compiler
and `ptxas` are separate processes, and the compiler passes release the GIL: it is held for about a
quarter of the total time.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from aquifer.kernels._launch import Repeatable, repeatable
from aquifer.kernels._tensor_map import TensorMap

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
"""Whether kernels run on CPU tensors too, in Triton's interpreter; for tests, which must set
TRITON_INTERPRET=1 before anything imports Triton."""

overlap = True
"""Whether kernels start before their predecessors end, on devices that support it (Hopper and
later). Read at each launch; a captured CUDA graph keeps it."""


_modules: set[str] = set()
"""Modules with Aquifer's kernels."""


class Compilations:
    """Count of our kernels that were compiled, or read from Triton's cache on disk.

    Either way a launch waited for it.
    """

    def __init__(self) -> None:
        self.count = 0
        if triton is not None:
            triton.knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, **launch: Any) -> None:
        """Called by Triton when a kernel has been compiled."""
        if launch["fn"].module in _modules:
            self.count += 1


compilations = Compilations()

_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


def jit(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit`; without Triton, return the function unchanged: it is never called."""
    return jit_once()(function)


def jit_once(
    *, counts: Sequence[str] = (), indices: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Apply `jit` without the specializations that would recompile a kernel as batches change.

    Triton specializes on numbers that are 1 or a multiple of 16, and on aligned addresses.

    Args:
        counts: parameters that are such numbers, such as the number of rows.
        indices: parameters that are slices of tensors, and so may start at any alignment.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return function
        _modules.add(function.__module__)
        return triton.jit(
            function, do_not_specialize=list(counts), do_not_specialize_on_alignment=list(indices)
        )

    return decorate


class Recording:
    """The launches of an operation, to be repeated with other tensors of the same shapes.

    At each launch Triton works out from the arguments which compiled kernel they need, and that
    takes 30 to 50 us on the host. A repeated launch takes 6 to 7 us (`_launch.py`). The layers of a
    model are such repetitions: they differ in addresses only.

    A context manager: `launch` adds what is launched in its body, by the same thread on the current
    stream. Tensors that the operation allocates are kept, and used again by each repetition. What
    else is launched there is not repeated.

    Args:
        tensors: tensors of the operation that others take the place of. So do views of theirs which
            begin in the first row, if that is contiguous.

    Attributes:
        launches: what was launched.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._strides = [tensor.stride() for tensor in tensors]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._row_bytes = [_first_row_bytes(tensor) for tensor in tensors]
        self._is_repeatable = True
        device = tensors[0].device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
        self.launches: list[Repeatable] = []
        # (launch, argument, tensor, bytes after it) of each argument that is of `tensors`.
        self._places: list[tuple[Repeatable, int, int, int]] = []
        self._kept: list[Any] = []  # the arguments as they were, so that their memory stays

    def __enter__(self) -> Recording:
        _recorded.by = self
        return self

    def __exit__(self, *exception: object) -> None:
        _recorded.by = None

    def add(self, compiled: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
        """Add a launch; `compiled` is None if it has not been launched, or is interpreted."""
        if compiled is None:
            self._is_repeatable = False
            return
        self._kept.append(arguments)
        repeated = repeatable(compiled, grid, [_value(argument) for argument in arguments])
        self.launches.append(repeated)
        self._places += [
            (repeated, index, *place)
            for index, argument in enumerate(arguments)
            if (address := _address(argument)) is not None
            and (place := self._place(address)) is not None
        ]

    def _place(self, address: int) -> tuple[int, int] | None:
        """Which tensor an address is of, and how many bytes after its beginning."""
        if address in self._addresses:
            return self._addresses.index(address), 0
        for index, (first, num_bytes) in enumerate(
            zip(self._addresses, self._row_bytes, strict=True)
        ):
            if first < address < first + num_bytes:
                return index, address - first
        return None

    def fits(self, *tensors: torch.Tensor) -> bool:
        """Whether `repeat` does what the operation would do with these tensors.

        Their shapes are not compared: the caller knows that the operation's are the same. Tensors
        may have more rows.
        """
        if not self._is_repeatable or not self.launches:
            return False
        for tensor, stride, address in zip(tensors, self._strides, self._addresses, strict=True):
            # Triton compiles differently for addresses that are not multiples of 16 bytes.
            if tensor.stride() != stride or (tensor.data_ptr() - address) % 16:
                return False
        return True

    def repeat(self, *tensors: torch.Tensor) -> None:
        """Launch everything again. Pre-condition: `fits`."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        for launch_, index, which, num_bytes in self._places:
            launch_.put(index, addresses[which] + num_bytes)
        for launch_ in self.launches:
            launch_.run(self._stream)


def _address(argument: Any) -> int | None:
    """The address that an argument of a launch stands for, if any."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return argument.address if isinstance(argument, TensorMap) else None


def _value(argument: Any) -> Any:
    """What a repeatable launch takes for an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return argument.copy() if isinstance(argument, TensorMap) else argument


def _first_row_bytes(rows: torch.Tensor) -> int:
    """How long the first row of a tensor is; 0 if it is a vector, or its rows have gaps."""
    if rows.dim() < 2 or not len(rows) or not rows[0].is_contiguous():
        return 0
    return rows[0].numel() * rows.itemsize


class _Recorded(threading.local):
    by: Recording | None = None


_recorded = _Recorded()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; the same as `kernel[grid](*arguments, **options)`, but for `Recording`.

    Args:
        kernel: the kernel.
        grid: number of programs in one to three dimensions.
        arguments: the kernel's first arguments.
        options: all its other arguments, by name, and options of the launch.
    """
    compiled = kernel[grid](*arguments, **options)
    if _recorded.by is not None:
        names = getattr(kernel, "arg_names", ())[len(arguments) :]
        _recorded.by.add(compiled, grid, [*arguments, *(options[name] for name in names)])


class _Zeros(TorchFunctionMode):
    """Mode in which newly allocated tensors are zeroed."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result


class _Collected(threading.local):
    builds: dict[str, Callable[[], None]] | None = None


collected = _Collected()
"""What `compile_later` was given in the body of this thread's `compiled_together`; None outside."""


def compile_later(key: str, build: Callable[[], None]) -> bool:
    """Have a kernel built when the body of `compiled_together` ends; False outside of one.

    It is not launched before.

    Args:
        key: names what is built.
        build: builds it, in another thread.
    """
    if collected.builds is None:
        return False
    collected.builds.setdefault(key, build)
    return True


@contextmanager
def compiled_together(
    device: torch.device, on_compiled: Callable[[int, int], None] = lambda _, __: None
) -> Iterator[None]:
    """Compile the kernels launched in the body, in parallel, when the body ends.

    In the body, a kernel of ours that is not compiled yet is not launched: its outputs keep their
    contents. Tensors of `torch.empty` are zeroed, so that kernels that read such outputs find
    valid indices. The body must therefore be a step with unused results; everything else in it
    takes effect, as do launches of other threads. Without a GPU this context does nothing.

    A compiler error is raised when the kernel is next launched.

    Args:
        device: the device that kernels run on.
        on_compiled: called with the number of kernels that are ready, and of all.
    """
    if device.type != "cuda":
        yield
        return
    wanted: dict[str, Any] = {}  # description of a kernel's specialization -> the kernel
    body = threading.get_ident()

    def note(**launch: Any) -> bool:
        """Called by Triton before it compiles; True makes it skip compilation and launch."""
        if threading.get_ident() != body or launch["fn"].module not in _modules:
            return False
        wanted.setdefault(launch["compile"]["specialization_data"], launch["fn"].jit_function)
        return True

    builds: dict[str, Callable[[], None]] = {}
    hooks = triton.knobs.runtime
    before, hooks.jit_cache_hook = hooks.jit_cache_hook, note
    collected.builds = builds
    try:
        with _Zeros():
            yield
    finally:
        hooks.jit_cache_hook = before
        collected.builds = None

    def build(description: str) -> Any:
        compiled = wanted[description].preload(description)
        # Builds the launcher, which is loaded again below.
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
        return compiled

    if not wanted and not builds:
        return
    start_compiler(device).join()
    with ThreadPoolExecutor(
        thread_name_prefix="compile", initializer=torch.cuda.set_device, initargs=(device,)
    ) as threads:
        jobs = [threads.submit(build, description) for description in wanted]
        others = [threads.submit(each) for each in builds.values()]
        for num_done, _ in enumerate(as_completed([*jobs, *others]), 1):
            on_compiled(num_done, len(jobs) + len(others))
    # One after another: when Python loads a launcher of Triton 3.6 again, which kernels with equal
    # arguments share, it puts its functions into the module of the launcher that was loaded last.
    # A thread that loads one meanwhile would take the function of the other.
    for job in jobs:
        if job.exception() is None:
            _ = job.result().run  # the first access loads the launcher, and the kernel


def kernel_folder() -> str:
    """Where Triton keeps what it has compiled."""
    return str(triton.knobs.cache.dir)


@jit
def _empty_kernel() -> None:
    """Do nothing."""


@functools.cache
def start_compiler(device: torch.device) -> threading.Thread:
    """Run Triton's once-per-process setup in a thread, while weights are loaded.

    Triton hashes its own sources, which otherwise every compiling thread would repeat, and builds
    a module with the C compiler. This takes most of a second.

    Args:
        device: the device that kernels will run on.
    """

    def compile_nothing() -> None:
        torch.cuda.set_device(device)
        _ = _empty_kernel.warmup(grid=(1,)).run

    thread = threading.Thread(target=compile_nothing, name="compile", daemon=True)
    thread.start()
    return thread


KERNEL_ALIGNMENT_BYTES = 16
"""Triton compiles a kernel for addresses that are multiples of this, and again for others."""

MIN_DOT = 16
"""The smallest side of a matrix product in Triton."""


def pow2(number: int, at_least: int = 1) -> int:
    """Return the next power of two, as Triton requires of block sizes."""
    return max(1 << (number - 1).bit_length(), at_least)


def row_unit(rows: torch.Tensor) -> int:
    """The largest power of two, up to 16, that divides the distance of a tensor's rows.

    A kernel reads 16 bytes at a time only where Triton knows that each row is aligned. It looks for
    multiples of 16 elements, but 8 of two bytes would do. So a kernel is given the distance in
    units, and the unit as a constant.
    """
    return math.gcd(rows.stride(0), 16)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on that tensor runs a Triton kernel rather than the reference."""
    return tensor.is_cuda or interpret_on_cpu


@functools.lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache
def count_multiprocessors(device: torch.device) -> int:
    """Number of SMs (streaming multiprocessors); 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel that keeps the rules above: `overlaps` and Triton's own."""
    if overlap and is_hopper(device):
        return {"overlaps": True, "launch_pdl": True}
    return {"overlaps": False}


@jit
def await_predecessor(overlaps: constexpr) -> None:
    """Wait until the kernel before this one is complete; see the rules above."""
    if overlaps:
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(addresses: tensor, wanted: tensor) -> None:
    """Begin to fetch the line around each wanted address into the L2 cache.

    This may be done before the kernel waits: the cache sees what is written later.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            @wanted prefetch.global.L2 [$1];
            mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def release_successor(overlaps: constexpr) -> None:
    """Let the next kernel start once all programs have called this or ended."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
