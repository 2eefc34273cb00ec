"""Sampling by ranks: which of its kernels run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine import sampler
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.kernels.sampling.sample import sample
from aquifer.parallel.ranks import Ranks

CHANGES: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"logit_bias": {3: 2.0}},
    {"allowed_token_ids": [7, 8, 9]},
    {"min_tokens": 4},
]


def test_joined_logits_are_sampled_by_the_kernels_of_one_variant(
    ranks_of: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the warm-up of a device compiles, which samples from joined logits in full and
    penalized mode alone."""
    variants: set[str] = set()

    def noted(*arguments: Any, variant: Any) -> None:
        variants.add(variant)
        sample(*arguments, variant=variant)

    monkeypatch.setattr(sampler, "sample", noted)
    config = EngineConfig(
        (ModelSpec("m", tiny_llama(tmp_path / "m")),),
        device="cpu",
        tensor_parallel_size=2,
        memory_bytes=32 << 20,
        max_model_len=64,
    )
    with closing(Engine.open(config, ranks=ranks_of(2))) as engine:
        for number, change in enumerate(CHANGES):
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, max_tokens=5, **change)
                engine.add(Request(f"{number} {temperature}", "m", [5, 6, 7], params, 0.0))
        while engine.has_work:
            engine.step()
    assert variants == {"full"}
