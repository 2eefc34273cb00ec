"""Regions of predicted size on a GPU, in pages that come and go and in memory that is not virtual.

Their tokens are those of the virtual cache: in steps that are captured, with regions that are
outgrown and copied, with preempted requests, and with clients that leave while steps are in flight.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from tests.architectures import OUR_DECODER, save_tiny
from tests.gpu.test_engine import (
    SEED,
    Tokens,
    assert_best,
    collect,
    generate,
    greedy,
    load,
    open_llm,
    random_prompts,
)

from aquifer.bench.soak import Sample, check_idle, soak
from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.lane import Lane
from aquifer.engine.params import Request
from aquifer.llm import LLM
from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.driver.plain import PlainDriver
from aquifer.memory.pool import Kind, Owner
from aquifer.predict.lengths import Forecast

MIB = 1 << 20
FORECASTS = ("none", "short", "right", "any")
"""What is forecast of an output: nothing, 2 tokens, its own length, or any of these."""


@pytest.fixture
def forecast(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Have the cache told this of all outputs."""
    what: str = request.param
    random = Random(5)
    expect = BucketedCache.expect

    def expected_to_be(
        cache: BucketedCache, slot: int, num_prompt: int, num_total: int, _: Any = None
    ) -> None:
        lengths = {"none": None, "short": 2, "right": max(num_total - num_prompt, 1)}
        length = random.choice(list(lengths.values())) if what == "any" else lengths[what]
        known = None if length is None else Forecast.certain(length)
        expect(cache, slot, num_prompt, num_total, known)

    monkeypatch.setattr(BucketedCache, "expect", expected_to_be)
    return what


@contextmanager
def bucketed(
    folder: Path, kept_bytes: int | None, **options: Any
) -> Iterator[tuple[LLM, Lane, BucketedCache]]:
    """An engine with regions, in pages or in so much memory; in the end, all is accounted for."""
    with open_llm(
        folder,
        dtype="float32",
        kv_cache="bucketed",
        bucket_memory=kept_bytes,
        guard_pages=False,
        **options,
    ) as llm:
        (lane,) = llm.engine.lanes.values()
        cache = lane.cache
        assert isinstance(cache, BucketedCache)
        assert isinstance(llm.engine.pool.driver, CudaDriver if kept_bytes is None else PlainDriver)
        assert lane.captured_sizes
        yield llm, lane, cache
        assert not cache.occupancy
        check_idle(llm)
        assert (cache.kept_bytes > 0) == (kept_bytes is not None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with contexts of 128 tokens: two sizes of regions."""
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(OUR_DECODER["llama"](), folder, SEED)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with KV of 128 KiB a token, 16 tokens to a page, and contexts of 512 tokens."""
    folder = tmp_path_factory.mktemp("wide")
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=512,
    )
    save_tiny(config, folder, SEED)
    return folder


TINY_PROMPTS = random_prompts((1, 12, 33, 70, 5, 60, 40, 64, 80))
TINY_PARAMS = [greedy(n) for n in (40, 24, 60, 30, 1, 44, 30, 17, 48)]
WIDE_PROMPTS = random_prompts([40 + i * 17 % 60 for i in range(12)])
WIDE_PARAMS = [greedy(120 + i * 29 % 80) for i in range(len(WIDE_PROMPTS))]


@pytest.fixture(scope="module")
def tiny_tokens(tiny: Path) -> Tokens:
    with open_llm(tiny, dtype="float32") as llm:
        return generate(llm, TINY_PROMPTS, TINY_PARAMS)


@pytest.fixture(scope="module")
def wide_tokens(wide: Path) -> Tokens:
    with open_llm(wide, dtype="float32") as llm:
        return generate(llm, WIDE_PROMPTS, WIDE_PARAMS)


def tokens(llm: LLM, prompts: Tokens, params: Any) -> Tokens:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("forecast", FORECASTS, indirect=True)
@pytest.mark.parametrize(
    ("kept_bytes", "max_num_batched_tokens"), [(None, None), (16 * MIB, None), (16 * MIB, 16)]
)
def test_the_same_tokens(
    tiny: Path,
    tiny_tokens: Tokens,
    forecast: str,
    kept_bytes: int | None,
    max_num_batched_tokens: int | None,
) -> None:
    options = {"max_num_batched_tokens": max_num_batched_tokens}
    with bucketed(tiny, kept_bytes, **options) as (llm, lane, cache):
        for _ in range(2):  # the second time in places that others have left
            assert tokens(llm, TINY_PROMPTS, TINY_PARAMS) == tiny_tokens
        assert lane.num_preemptions == 0
        if forecast != "any":
            assert (cache.num_overflows > 0) == (forecast == "short")
        assert cache.migrated_bytes >= cache.num_overflows * cache.block_bytes


@pytest.mark.parametrize("forecast", ["short", "any"], indirect=True)
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("is_virtual", [True, False])
def test_in_little_memory(
    wide: Path, wide_tokens: Tokens, forecast: str, preemption_mode: str, is_virtual: bool
) -> None:
    """150 MiB, where a region of the longest context takes 64 MiB."""
    kept_bytes = None if is_virtual else 150 * MIB
    options = {"enable_prefix_caching": False, "preemption_mode": preemption_mode}
    with bucketed(wide, kept_bytes, **options) as (llm, lane, cache):
        pool = llm.engine.pool
        others = None
        if is_virtual:
            llm.engine.meter.every_s = float("inf")
            pool.account_overhead(pool.driver.overhead_bytes())
            count = (pool.free_bytes - 150 * MIB) // pool.page_bytes
            others = pool.acquire(Owner("others", Kind.PREFIX), count)
            assert others is not None
        outputs = tokens(llm, WIDE_PROMPTS, WIDE_PARAMS)
        if forecast == "short":
            assert cache.num_overflows > 0
            assert lane.num_preemptions > 0
            assert (lane.num_swaps > 0) == (preemption_mode == "swap")
        if others is not None:
            pool.release(others)
    if outputs != wide_tokens:  # what is computed again is rounded otherwise
        assert_best(load(wide, torch.float32), WIDE_PROMPTS, outputs)


@pytest.mark.parametrize("forecast", ["any"], indirect=True)
@pytest.mark.parametrize("is_virtual", [True, False])
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.usefixtures("forecast")
def test_a_crowd_with_clients_that_leave(
    wide: Path, is_virtual: bool, preemption_mode: str
) -> None:
    """`soak` checks the books meanwhile, and that no piece is lost."""
    options = {"preemption_mode": preemption_mode, "length_prediction": "prior"}
    sample = Sample(40, 150)
    kept_bytes = None if is_virtual else 4 * 12 * MIB  # a region of 96 tokens takes 12 MiB
    with bucketed(wide, kept_bytes, max_model_len=96, **options) as (llm, _, _):
        result = soak(llm, 150, 96, seed=1, lengths="shifting", sample=sample)
        assert result.num_left > 0
        assert result.buckets is not None
        assert result.buckets.num_overflows > 0
        assert result.num_preemptions > 0 or is_virtual
    with open_llm(wide, dtype="float32", max_model_len=96) as llm:
        assert sample.compare(llm) == 40


@pytest.mark.parametrize("forecast", ["short"], indirect=True)
@pytest.mark.parametrize("kept_bytes", [None, 16 * MIB])
@pytest.mark.usefixtures("forecast")
def test_clients_that_leave_while_regions_move(
    tiny: Path, tiny_tokens: Tokens, kept_bytes: int | None
) -> None:
    """Steps in flight write to regions that others get at once."""
    with bucketed(tiny, kept_bytes) as (llm, _, cache):
        engine = llm.engine
        (model,) = engine.models
        for turn in range(3):
            found: defaultdict[str, list[int]] = defaultdict(list)
            for number, (prompt, params) in enumerate(zip(TINY_PROMPTS, TINY_PARAMS, strict=True)):
                for name in (f"{turn}-{number}", f"{turn}-{number}-leaves"):
                    engine.add(Request(name, model, prompt, params, time.monotonic()))
            leaving = [f"{turn}-{number}-leaves" for number in range(len(TINY_PROMPTS))]
            while engine.has_work:
                collect(engine.step(), found)
                if leaving:
                    engine.abort(leaving.pop())
            whole = [found[f"{turn}-{number}"] for number in range(len(TINY_PROMPTS))]
            assert whole == tiny_tokens
        assert cache.num_overflows > 0


def test_memory_that_is_not_virtual_is_torchs_own(tiny: Path) -> None:
    """It is taken once, and given back when the engine is closed."""
    left_bytes = [torch.cuda.memory_allocated()]
    for _ in range(3):  # the first time, libraries take workspaces for good
        with bucketed(tiny, 64 * MIB) as (llm, _, cache):
            driver = llm.engine.pool.driver
            assert isinstance(driver, PlainDriver)
            assert driver.reserved_bytes > 64 * MIB
            assert torch.cuda.memory_allocated() - left_bytes[-1] >= driver.reserved_bytes
            assert 63 * MIB < cache.kept_bytes <= 64 * MIB
            pages = llm.engine.pool.pages
            num_calls = pages.num_foreground_calls
            tokens(llm, TINY_PROMPTS, TINY_PARAMS)
            assert pages.num_foreground_calls == num_calls
        gc.collect()
        left_bytes.append(torch.cuda.memory_allocated())
    assert abs(left_bytes[3] - left_bytes[2]) < 4 * MIB


def test_plain_memory_on_a_gpu() -> None:
    driver = PlainDriver(CudaDriver())
    page_bytes = driver.default_page_bytes
    num_bytes = 256 * page_bytes
    torch.zeros(1, device="cuda")  # so that the context is there
    overhead_bytes = driver.overhead_bytes()
    address = driver.reserve(num_bytes)
    assert address % driver.granularity_bytes == 0
    # torch takes memory in stretches, of which the last may be larger than what is needed of it.
    assert abs(driver.overhead_bytes() - overhead_bytes) < 64 * MIB < num_bytes
    view = driver.view(address, num_bytes)
    assert view.is_cuda
    assert not view.any()
    handles = driver.create(page_bytes, 2)
    driver.map(address + page_bytes, handles)
    driver.fill(handles, 7)
    rows = view.view(256, -1)[:4]
    assert rows.amin(1).tolist() == rows.amax(1).tolist() == [0, 7, 7, 0]
    assert driver.unlike(handles, 7) == []
    driver.unmap(address + page_bytes, page_bytes, 2)
    driver.release(handles)
    driver.free(address, num_bytes)
    driver.close()
