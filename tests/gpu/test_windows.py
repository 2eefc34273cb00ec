"""Models with windows on a GPU: captured steps over pages that come and go behind the windows.

A kernel that touched a page that was given back would fault, and end the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.architectures import VOCAB_SIZE, save_tiny
from tests.gpu.test_engine import assert_best, generate, greedy, load, open_llm

from aquifer.cache import KV_CACHES
from aquifer.llm import LLM

WINDOW_TOKENS = 200
STEP_TOKENS = 512
"""64 tokens of the layers with a window are a page of 2 MiB, so a window is a few pages."""


@pytest.fixture(scope="module", params=["some layers", "all layers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "max_position_embeddings": 4096,
        "sliding_window": WINDOW_TOKENS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if request.param == "some layers":
        config = transformers.Gemma2Config(**sizes)
    else:
        sizes["num_hidden_layers"] = 2
        config = transformers.MistralConfig(**sizes)
    folder: Path = tmp_path_factory.mktemp("windows")
    save_tiny(config, folder, 2)
    return folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    long = tokens(3000)
    return [long, long[:1700] + tokens(40), long[:2999], tokens(700), tokens(3), tokens(1300)]


@pytest.fixture(params=[0, 1], ids=["no step ahead", "one step ahead"])
def num_ahead(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_long_sequences(folder: Path, kv_cache: str, num_ahead: int) -> None:
    """Tokens equal Transformers', also with cached prefixes; KV takes the memory of its windows."""
    model = load(folder, torch.float32)
    options = {"kv_cache": kv_cache, "max_num_batched_tokens": STEP_TOKENS}
    with open_llm(folder, **options) as llm:
        llm.engine.num_ahead = num_ahead
        (lane,) = llm.engine.lanes.values()
        assert lane.has_windows
        for _ in range(2):
            assert_best(model, prompts(), generate(llm, prompts(), greedy(300)))
        assert lane.prefixes is not None
        assert lane.prefixes.stats.hit_tokens > 3000


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_little_memory(folder: Path, kv_cache: str, preemption_mode: str) -> None:
    """What is given back is used again at once, by the same sequences and by others."""
    model = load(folder, torch.float32)
    options = {
        "kv_cache": kv_cache,
        "max_num_batched_tokens": STEP_TOKENS,
        "preemption_mode": preemption_mode,
    }
    with open_llm(folder, **options) as llm:
        memory_bytes = _just_enough(llm, 3310)
    with open_llm(folder, **{**options, "memory": memory_bytes}) as llm:
        asked = prompts() * 2
        assert_best(model, asked, generate(llm, asked, greedy(300)))


def _just_enough(llm: LLM, num_tokens: int) -> int:
    """Bytes of a pool that holds the longest request, and half as much beside."""
    (info,), (lane,) = llm.engine.models.values(), llm.engine.lanes.values()
    pool = llm.engine.pool
    kv_bytes = lane.cache.footprint.most(1, num_tokens) * pool.page_bytes
    return info.weight_bytes + pool.usage().overhead_bytes + kv_bytes * 3 // 2 + (256 << 20)
