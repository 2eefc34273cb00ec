"""Shared, copied, swapped and retained KV on a GPU: the same tokens as without any of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.architectures import OUR_DECODER, VOCAB_SIZE, save_tiny

from aquifer.cache import KV_CACHES
from aquifer.cache.base import AttentionOptions, KVLayout, LayerKV, Rows, Spans
from aquifer.cache.virtual import VirtualCache
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import RequestOutput, TokenOutput
from aquifer.engine.params import BeamSearchParams, SamplingParams
from aquifer.llm import LLM
from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.pool import Kind, Owner, Page, PagePool

MIB = 1 << 20
# One layer's K and V of a token are 32 KiB, so that prompts of a few hundred tokens are many pages.
WIDE = {"num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 256, "hidden_size": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLES = SamplingParams(n=4, seed=3, max_tokens=24, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True).sampling_params()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    config = OUR_DECODER["llama"]()
    config.update({**WIDE, "max_position_embeddings": 2048})
    save_tiny(config, folder, 5)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = Random(0)
    beginning = [random.randrange(VOCAB_SIZE) for _ in range(500)]
    return [
        beginning[: random.randrange(100, 500)] + [random.randrange(VOCAB_SIZE) for _ in range(9)]
        for _ in range(6)
    ]


@pytest.fixture
def cache() -> Iterator[VirtualCache]:
    driver = CudaDriver(0)
    pool = PagePool(driver, 64 * MIB)
    layout = KVLayout((LayerKV(8, 128, 128),) * 32, torch.bfloat16)
    cache = VirtualCache(pool, Owner("m", Kind.KV), layout, 4, 1024)
    yield cache
    cache.close()
    pool.close()
    driver.close()


def run(
    folder: Path, prompts: list[list[int]], params: Any, **options: Any
) -> list[list[list[int]]]:
    """Token ids of all completions."""
    options = {"memory": "8GiB", "dtype": "float32", "seed": 0, **options}
    with LLM(folder, device="cuda", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.pool.check()
        (memory,) = llm.memory().models.values()
        assert memory.bytes_by_kind[Kind.KV] == 0
        return token_ids(outputs)


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_the_first_slot_need_not_be_mapped(cache: VirtualCache) -> None:
    """Kernels always get the address of slot 0; nothing may query what is mapped there."""
    assert cache.reserve(np.array([2]), np.array([20]))
    for count, num_decodes in ((17, 0), (1, 1)):
        spans = Spans.make(np.array([2]), np.array([0]), np.array([count]))
        rows = Rows.of(spans, num_decodes, torch.device("cuda", 0))
        view = cache.tensors.view(rows)
        key = torch.ones((count, 8, 128), dtype=torch.bfloat16, device="cuda")
        view.write(0, key, key)
        query = torch.ones((count, 32, 128), dtype=torch.bfloat16, device="cuda")
        out = view.attend(0, query, AttentionOptions(1.0))
        torch.testing.assert_close(out, torch.ones_like(out))
    cache.release(2)


@pytest.mark.parametrize("params", [GREEDY, SAMPLES, BEAMS], ids=["greedy", "samples", "beams"])
def test_caches_agree(folder: Path, prompts: list[list[int]], params: SamplingParams) -> None:
    """With each cache manager, with retained prefixes and without: the same tokens."""
    results = [
        run(folder, prompts, params, kv_cache=kv_cache, enable_prefix_caching=keeps)
        for kv_cache in KV_CACHES
        for keeps in (True, False)
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_preempted_groups_lose_nothing(
    folder: Path, prompts: list[list[int]], kv_cache: str, mode: Any
) -> None:
    params = [replace(each, max_tokens=96) for each in (GREEDY, SAMPLES, BEAMS)] * 2
    options: dict[str, Any] = {"memory": "8GiB", "dtype": "float32", "kv_cache": kv_cache}
    with LLM(folder, device="cuda", seed=0, preemption_mode=mode, **options) as llm:
        (lane,) = llm.engine.lanes.values()
        expected = token_ids(llm.generate(prompts, params, use_tqdm=False))
        assert lane.num_preemptions == 0
        assert lane.prefixes is not None
        lane.prefixes.clear()
        with squeezed(llm.engine):
            assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == expected
        llm.engine.pool.check()
        assert lane.num_preemptions > 1
        assert (lane.num_swaps > 0) == (mode == "swap")


@contextmanager
def squeezed(engine: Engine) -> Iterator[None]:
    """Another owner takes all free pages now and then, until a request is preempted."""
    (lane,) = engine.lanes.values()
    others: list[Page] = []
    real_step = engine.step
    num_steps = num_before = 0

    def step() -> list[TokenOutput]:
        nonlocal num_steps, num_before
        num_steps += 1
        if others and lane.num_preemptions > num_before:
            engine.pool.release(others)
            others.clear()
        elif not others and num_steps % 20 == 0 and len(lane.running) > 1:
            num_before = lane.num_preemptions
            count = engine.pool.free_bytes // engine.pool.page_bytes
            others.extend(engine.pool.acquire(Owner("others", Kind.WEIGHTS), count) or ())
        return real_step()

    engine.step = step  # type: ignore[method-assign]
    yield
    engine.pool.release(others)


def test_a_cached_prompt_maps_nothing(folder: Path, prompts: list[list[int]]) -> None:
    """The slot that a conversation ran in is the one where it goes on."""
    with LLM(folder, device="cuda", memory="8GiB", dtype="float32", seed=0) as llm:
        for prompt in prompts[:3]:
            llm.generate([prompt], GREEDY, use_tqdm=False)
        calls: list[int] = []
        driver = llm.engine.pool.driver
        real_map = driver.map

        def counted(address: int, handles: Any) -> None:
            calls.append(len(handles))
            real_map(address, handles)

        driver.map = counted  # type: ignore[method-assign]
        (output,) = llm.generate([prompts[1] + [1]], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens > len(prompts[1]) - 40
        # The page that it writes on next is a copy; beyond that, at most some ahead of need.
        assert sum(calls) <= 6
