"""Compiling in parallel: nothing runs meanwhile, everything is compiled after, once.

The compiler is the real one, for a GPU that need not be there; what would launch its results only
takes notes. All that happens in a process of its own, for in this one kernels may be interpreted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cases import EVERY_KERNEL_CASE

HIDDEN = 64
LAUNCHES = {"_rms_norm_kernel": 4, "_silu_mul_kernel": 1, "_rotary_angles_kernel": 1}
"""Launches of each kernel in one step; the first kernel runs with two dtypes."""
ATTENTION = (
    (16, False, 1, False),
    (128, True, 8, True),
    *(
        [(128, True, 8, False), (64, True, 8, True), (128, False, 1, False)]
        if EVERY_KERNEL_CASE
        else ()
    ),
)
"""Head dimension, whether the KV is paged, rows that decode, and whether there are sinks and slopes
(ALiBi)."""
LATENT = (
    (128, torch.bfloat16, 64),
    (16, torch.float32, None),
    *([(16, torch.bfloat16, None), (16, torch.float32, 16)] if EVERY_KERNEL_CASE else ()),
)
"""Heads, dtype, and tokens of a block, for attention over latent KV."""
MAX_STACK_BYTES = 768
"""Local memory of a thread. It is slow, and a GPU sets it aside for all threads that
it can run at once: a gigabyte for 4 KiB. Latent attention of 64 heads needs the most: 160 bytes
with Triton 3.6, all of them outside of its loop, and 672 with Triton 3.9."""


class NotingDriver:
    """A driver for Triton: a Hopper GPU on which nothing runs."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}  # compiled so far, by name
        self.launched: list[str] = []
        self.loaded_by: list[str] = []  # names of threads, one for each variant of a kernel
        self.binaries: list[tuple[str, bytes]] = []  # names and contents, likewise
        self.loaded_alone: list[bool] = []  # of each launch, whether its launcher was loaded alone
        self._num_loading = 0
        self._loads = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        name = source.fn.fn.__name__
        self.kernels[name] = source.fn
        self._num_loading += 1
        self._loads += 1
        number = self._loads
        is_alone = self._num_loading == 1
        time.sleep(0.05)  # so that other threads come meanwhile, if they may
        is_alone &= number == self._loads
        self._num_loading -= 1

        def launch(*arguments: Any) -> None:
            self.launched.append(name)
            self.loaded_alone.append(is_alone)

        return launch

    def _load(self, name: str, binary: bytes, *rest: Any) -> tuple[Any, ...]:
        self.loaded_by.append(threading.current_thread().name)
        self.binaries.append((name, binary))
        return object(), name, 0, 0, 1024  # module, function, registers, spills, threads


def stack_bytes(binary: bytes) -> int:
    """Bytes of local memory of each thread of a compiled kernel: spilled registers."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", report)
    return int(found)


def attend(head_dim: int, paged: bool, num_decodes: int, has_sinks: bool) -> None:
    """One step of attention, and a chunk of a prompt, in float32."""
    from aquifer.kernels.decode_attention import DecodeWorkspaces, decode_attention
    from aquifer.kernels.prefill_attention import PrefillSpans, prefill_attention

    # All rows are of one sequence, of 600 tokens.
    kv = torch.zeros(1, 600, 2, head_dim)
    tables = None
    if paged:
        kv, tables = kv.view(40, 15, 2, head_dim), torch.arange(40)[None]
    query = torch.zeros(num_decodes, 2, head_dim)
    slots = torch.zeros(num_decodes, dtype=torch.int64)
    workspace, config = DecodeWorkspaces().get(query, kv, paged=paged)
    sinks = slopes = None
    if has_sinks:
        sinks, slopes = torch.zeros(2), torch.zeros(2)
    kv_of = kv, kv, tables, slots, slots + 600
    decode_attention(query, *kv_of, query, workspace, config, scale=1.0, sinks=sinks, slopes=slopes)
    spans = PrefillSpans.of([0], [598], [0, 2], torch.device("cpu"))
    query = torch.zeros(2, 2, head_dim)
    prefill_attention(query, kv, kv, tables, spans, scale=1.0, sinks=sinks, slopes=slopes)


def attend_latent(num_heads: int, dtype: torch.dtype, block_size: int | None) -> None:
    """One step of attention over latent KV of DeepSeek's size, and a chunk of a prompt."""
    from aquifer.kernels.latent import head_products, latent_rope_write
    from aquifer.kernels.latent_attention import (
        LatentWorkspaces,
        latent_decode_attention,
        latent_prefill_attention,
    )
    from aquifer.kernels.prefill_attention import PrefillSpans

    kv, tables = torch.zeros(1, 640, 1, 576, dtype=dtype), None
    if block_size is not None:
        kv, tables = kv.view(-1, block_size, 1, 576), torch.arange(640 // block_size)[None]
    query = torch.zeros(32, num_heads, 576, dtype=dtype)
    out = torch.zeros(32, num_heads, 512, dtype=dtype)
    slots = torch.zeros(32, dtype=torch.int64)
    workspace = LatentWorkspaces().get(query, 512, paged=tables is not None)
    latent_decode_attention(query, kv, tables, slots, slots + 600, out, *workspace, scale=1.0)
    spans = PrefillSpans.of([0], [598], [0, 2], torch.device("cpu"))
    latent_prefill_attention(query, kv, tables, spans, out, scale=1.0)
    angles = torch.zeros(32, 32)
    latent_rope_write(
        query[..., 512:], query[:, 0], out[0, 0], angles, angles, query[..., 512:], kv, slots,
        slots, eps=1e-6, is_interleaved=True,
    )  # fmt: skip
    both = torch.zeros(num_heads, 256, 512, dtype=dtype)
    head_products(query[..., :128], both[:, :128], query[..., :512])
    head_products(out, both[:, 128:].transpose(1, 2), out[..., :128])


def observe() -> dict[str, Any]:
    """Several steps of a few kernels, and what became of them."""
    torch.cuda.is_available = lambda: True  # else kernels would do without Triton
    torch.use_deterministic_algorithms(True)  # memory that was not written is NaN
    devices_set: list[str] = []
    torch.cuda.set_device = lambda device: devices_set.append(str(device))
    import triton
    import triton.language as tl
    from tests.kernels.test_all_reduce import inboxes_of

    from aquifer.kernels import _triton, all_reduce
    from aquifer.kernels.activation import silu_mul
    from aquifer.kernels.all_reduce import DATA_SLICE_WORDS, SLICE_WORDS
    from aquifer.kernels.norm import rms_norm
    from aquifer.kernels.rotary import rotary_angles

    _triton.interpret_on_cpu = True  # so that tensors on the CPU go to kernels
    driver = NotingDriver()
    triton.runtime.driver.set_active(driver)
    from_disk: list[bool] = []  # one for each time that the compiler is asked
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: from_disk.append(cache_hit)
    device = torch.device("cuda", 0)

    @triton.jit  # type: ignore[untyped-decorator]
    def foreign_kernel(out: tl.tensor) -> None:
        tl.store(out, 1.0)

    def step() -> list[torch.Tensor]:
        wide = torch.ones(3, HIDDEN)
        half = wide.half()
        return [
            *(rms_norm(wide, wide[0], 1e-6) for _ in range(3)),
            rms_norm(half, half[0], 1e-6),
            silu_mul(half),
            *rotary_angles(torch.arange(3), wide[0], 1.0),
        ]

    report: dict[str, Any] = {}

    def note(name: str) -> None:
        report[name] = {
            "launched": dict(Counter(driver.launched)),
            "from_disk": list(from_disk),
            "loaded_by": list(driver.loaded_by),
        }
        driver.launched.clear()
        from_disk.clear()
        driver.loaded_by.clear()

    try:
        with _triton.compiled_together(device):
            step()
            raise KeyError
    except KeyError:
        note("failed")
    with _triton.compiled_together(device):
        _triton.start_compiler(device).join()  # its thread compiles as ever
        note("started")
        report["is_zero"] = all(not out.isnan().any() and not out.any() for out in step())
        note("meanwhile")
    note("after")
    step()
    note("again")
    with _triton.compiled_together(device):
        step()
        foreign_kernel[(1,)](torch.zeros(1))
    note("compiled before, or foreign")
    peers = inboxes_of(2, torch.device("cpu"), (2, 3))[0]
    all_reduce.DTYPES = (torch.bfloat16,)
    with _triton.compiled_together(device):
        all_reduce.compile_all_reduce(peers, torch.device("cpu"))
    note("all-reduce")
    with _triton.compiled_together(device):
        for num_words in (1, 2 * SLICE_WORDS, 2 * SLICE_WORDS + 4, 3 * DATA_SLICE_WORDS):
            all_reduce.all_reduce(torch.zeros(2 * num_words, dtype=torch.bfloat16), peers)
    note("all-reduce again")
    driver.kernels["_rms_norm_kernel"].device_caches.clear()
    step()
    note("forgotten")
    for shape in ATTENTION:
        attend(*shape)
    for latent in LATENT:
        attend_latent(*latent)
    note("attention")
    report["stack_bytes"] = [(name, stack_bytes(binary)) for name, binary in driver.binaries]
    report["devices_set"] = devices_set
    report["loaded_alone"] = driver.loaded_alone
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
    }
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    child = subprocess.run(
        [sys.executable, Path(__file__)], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    result: dict[str, Any] = json.loads(child.stdout)
    return result


def test_nothing_runs_meanwhile_and_what_is_read_is_zero(report: dict[str, Any]) -> None:
    assert report["meanwhile"] == {"launched": {}, "from_disk": [], "loaded_by": []}
    assert report["is_zero"]


def test_the_compiler_is_started_by_an_empty_kernel(report: dict[str, Any]) -> None:
    assert report["started"] == {"launched": {}, "from_disk": [False], "loaded_by": ["compile"]}


def test_each_variant_is_compiled_and_loaded_once(report: dict[str, Any]) -> None:
    after = report["after"]
    assert after["launched"] == {}
    assert after["from_disk"] == [False] * 4
    assert after["loaded_by"] == ["MainThread"] * 4
    assert set(report["devices_set"]) == {"cuda:0"}


def test_launchers_are_loaded_one_after_another(report: dict[str, Any]) -> None:
    """Python mixes up Triton's launchers if threads load several at once, as all have one name."""
    assert set(report["loaded_alone"]) == {True}


def test_nothing_is_left_to_compile(report: dict[str, Any]) -> None:
    assert report["again"] == {"launched": LAUNCHES, "from_disk": [], "loaded_by": []}


def test_other_kernels_are_launched_as_ever(report: dict[str, Any]) -> None:
    launched = report["compiled before, or foreign"]["launched"]
    assert launched == LAUNCHES | {"foreign_kernel": 1}


def test_an_all_reduce_is_never_left_out(report: dict[str, Any]) -> None:
    """A rank would wait for another one that compiles it first."""
    kernels = "_all_reduce_messages_kernel", "_all_reduce_data_kernel"
    assert report["all-reduce"]["launched"] == {}
    assert report["all-reduce"]["from_disk"] == [False, False]
    assert report["all-reduce again"]["launched"] == dict.fromkeys(kernels, 2)
    assert report["all-reduce again"]["from_disk"] == []


def test_the_next_process_finds_them_on_disk(report: dict[str, Any]) -> None:
    assert report["forgotten"]["from_disk"] == [True, True]


def test_attention_compiles_for_any_head(report: dict[str, Any]) -> None:
    """The interpreter takes what the compiler refuses."""
    launched = report["attention"]["launched"]
    assert launched["_decode_attention_kernel"] == len(ATTENTION)
    assert launched["_prefill_attention_kernel"] == len(ATTENTION)
    assert launched["_latent_decode_kernel"] == len(LATENT)
    assert launched["_latent_prefill_kernel"] == len(LATENT)
    assert launched["_latent_rope_write_kernel"] == len(LATENT)
    assert launched["_head_products_kernel"] == 2 * len(LATENT)


def test_kernels_keep_to_registers(report: dict[str, Any]) -> None:
    attention = {"_decode_attention_kernel", "_prefill_attention_kernel"}
    attention |= {"_latent_decode_kernel", "_latent_prefill_kernel"}
    assert attention <= dict(report["stack_bytes"]).keys()
    assert [each for each in report["stack_bytes"] if each[1] > MAX_STACK_BYTES] == []


def test_a_step_that_fails_compiles_nothing(report: dict[str, Any]) -> None:
    assert report["failed"] == {"launched": {}, "from_disk": [], "loaded_by": []}


if __name__ == "__main__":
    json.dump(observe(), sys.stdout)
