"""Models that run the code of Transformers: captured as CUDA graphs where that is possible."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import TRANSFORMERS, save_tiny
from tests.gpu.test_engine import (
    Tokens,
    assert_best,
    generate,
    greedy,
    load,
    open_llm,
    random_prompts,
)
from transformers.models.nemotron.modeling_nemotron import NemotronMLP

from aquifer.cache import KV_CACHES
from aquifer.kernels.capture import GraphPool

SEED = 2
LENGTHS = (1, 12, 33, 70, 5, 17)
DEVICE = torch.device("cuda", 0)


def run(folder: Path, **options: Any) -> tuple[Tokens, bool]:
    """Tokens of some requests, many at once and one alone; and whether steps are captured."""
    prompts = random_prompts(LENGTHS)
    with open_llm(folder, dtype="float32", **options) as llm:
        outputs = generate(llm, prompts, [greedy(10 + 3 * i) for i in range(len(prompts))])
        alone = generate(llm, prompts[:1], greedy(24))
        (lane,) = llm.engine.lanes.values()
        is_captured = bool(lane.captured_sizes)
    model = load(folder, torch.float32)
    assert_best(model, prompts, outputs)
    assert_best(model, prompts[:1], alone)
    return [*outputs, *alone], is_captured


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("architecture", TRANSFORMERS)
def test_steps_are_captured(
    architecture: str, kv_cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks of prompts beside sequences that decode, and sequences alone."""
    save_tiny(TRANSFORMERS[architecture](), tmp_path, SEED)
    with caplog.at_level(logging.WARNING):
        _, is_captured = run(tmp_path, kv_cache=kv_cache, max_num_batched_tokens=32)
    assert is_captured, caplog.text


def waiting_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The MLP of Nemotron, which looks at a value on the host."""
    if x.isinf().any().item():
        return x
    result: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
    return result


def synchronising_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The MLP of Nemotron, which waits in a way that only a capture shows to be one."""
    torch.cuda.current_stream().synchronize()
    result: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
    return result


@pytest.mark.parametrize("forward", [waiting_mlp, synchronising_mlp])
def test_code_that_cannot_be_captured_is_served_kernel_by_kernel(
    forward: Callable[..., torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then a model whose code can be captured is, in the same process, with the same tokens."""
    save_tiny(TRANSFORMERS["nemotron"](), tmp_path, SEED)
    with monkeypatch.context() as patch:
        patch.setattr(NemotronMLP, "forward", forward)
        with caplog.at_level(logging.WARNING):
            waited, is_captured = run(tmp_path)
    assert not is_captured
    assert "run kernel by kernel, because its code cannot be captured" in caplog.text
    captured, is_captured = run(tmp_path)
    assert is_captured
    assert captured == waited


def test_memory_after_a_capture_that_failed() -> None:
    """It is given back, and the next capture works."""
    pool = GraphPool(DEVICE)
    x = torch.ones(1 << 20, device=DEVICE)
    y = x * 2
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def fail() -> None:
        for _ in range(4):
            _ = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE).fill_(1)
        x.sum().item()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="captur"):
            pool.capture(fail)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)

    def triple() -> None:
        y.copy_(x * 3)

    triple()  # loads its kernels
    graph = pool.capture(triple)
    x.fill_(5)
    graph.replay()
    assert (y == 15).all()
    assert torch.rand(8, device=DEVICE).unique().numel() > 1
