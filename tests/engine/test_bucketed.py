"""The engine with regions of predicted size: the same tokens, whatever is forecast, and each
request is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.cases import EVERY_CASE
from tests.engine.books import MAX_TOKENS, PAGE_BYTES, SchedulerWorld

from aquifer.bench.soak import Lengths, Sample, check_idle, soak
from aquifer.cache.bucketed import BucketedCache
from aquifer.config import ModelSpec
from aquifer.engine.lane import Lane
from aquifer.engine.lane_pages import most_pages
from aquifer.engine.outputs import RequestOutput
from aquifer.engine.params import BeamSearchParams, Request, SamplingParams
from aquifer.errors import CapacityError, ConfigError, InvariantError
from aquifer.llm import LLM
from aquifer.memory.pool import Kind, Owner
from aquifer.predict.forecaster import Asked
from aquifer.predict.lengths import Forecast

FAMILIES = ("llama", "gemma2")
"""The second one has layers with a window."""

OPTIONS: dict[str, Any] = {
    "page_size": "4KiB",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "seed": 0,
}
OUTPUT_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
PROMPT_TOKENS = (1, 40, 7, 23, 60, 40, 12, 33, 5, 18)
FORECASTS = {"none": None, "short": 2, "right": OUTPUT_TOKENS, "long": 500}

SHORTAGES = (
    ("none", "swap"),
    ("short", "swap"),
    ("right", "recompute"),
    ("short", "recompute"),
    *((("none", "recompute"), ("right", "swap")) if EVERY_CASE else ()),
)
"""(forecast, preemption) where memory is short: most is preempted with forecasts that are short."""

one_family = pytest.mark.parametrize(
    "folder", FAMILIES if EVERY_CASE else FAMILIES[:1], indirect=True
)
"""Runs a test with one family: what it tests is the same for all."""


def each_shortage(families: tuple[str, ...]) -> pytest.MarkDecorator:
    """The shortages with these families in turn; with `EVERY_CASE`, each with all."""
    found = [
        (family, *shortage)
        for number, shortage in enumerate(SHORTAGES)
        for family in (families if EVERY_CASE else [families[number % len(families)]])
    ]
    return pytest.mark.parametrize(
        ("folder", "forecast", "preemption_mode"), found, indirect=["folder", "forecast"]
    )


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(OUR_DECODER[request.param](), folder, 2)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What the model generates with the paged manager."""
    with LLM(folder, memory="16MiB", kv_cache="paged", **OPTIONS) as llm:
        return tokens(llm.generate(prompts(), GREEDY, use_tqdm=False))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def forecast(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int | None:
    """Have all outputs forecast to be of one length."""
    length: int | None = FORECASTS[request.param]
    expect = BucketedCache.expect

    def expected_to_be(
        cache: BucketedCache, slot: int, num_prompt: int, num_total: int, _: Any = None
    ) -> None:
        known = None if length is None else Forecast.certain(length)
        expect(cache, slot, num_prompt, num_total, known)

    monkeypatch.setattr(BucketedCache, "expect", expected_to_be)
    return length


@contextmanager
def bucketed(
    folder: Path, memory: str | int = "16MiB", **options: Any
) -> Iterator[tuple[LLM, Lane, BucketedCache]]:
    """An engine; in the end no page is left in use."""
    with LLM(folder, memory=memory, kv_cache="bucketed", **OPTIONS, **options) as llm:
        (lane,) = llm.engine.lanes.values()
        assert isinstance(lane.cache, BucketedCache)
        assert lane.prefixes is None
        yield llm, lane, lane.cache
        lane.cache.check()
        assert not lane.cache.occupancy
        check_idle(llm)


@pytest.mark.parametrize("forecast", FORECASTS, indirect=True)
def test_the_same_tokens(folder: Path, expected: list[list[int]], forecast: int | None) -> None:
    with bucketed(folder) as (llm, lane, cache):
        assert tokens(llm.generate(prompts(), GREEDY, use_tqdm=False)) == expected
        assert lane.num_preemptions == 0
        assert (cache.num_overflows > 0) == (forecast == 2)


def test_requests_grouped_by_bucket(folder: Path, expected: list[list[int]]) -> None:
    """A request for whose bucket there is a region need not wait for one that needs a larger one;
    but which tokens come out does not depend on that."""
    with bucketed(folder) as (llm, _, cache):
        (info,) = llm.engine.models.values()
        num_pages = cache.footprint.most(max(PROMPT_TOKENS), max(PROMPT_TOKENS) + OUTPUT_TOKENS)
    memory = info.weight_bytes + (num_pages + 2) * 4096
    orders = []
    for grouping in (False, True):
        with bucketed(folder, memory, bucket_grouping=grouping) as (llm, _, _):
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            assert tokens(outputs) == expected
            begun = []
            for number, output in enumerate(outputs):
                assert output.metrics is not None
                begun.append((output.metrics.scheduled_s or 0.0, number))
            orders.append([number for _, number in sorted(begun)])
    assert orders[0] == list(range(len(PROMPT_TOKENS)))
    assert orders[1] != orders[0]


@one_family
def test_grouping_needs_buckets(folder: Path) -> None:
    with pytest.raises(ConfigError, match="bucket_grouping needs kv_cache bucketed"):
        LLM(folder, memory="16MiB", kv_cache="paged", bucket_grouping=True, **OPTIONS)


@one_family
def test_an_option_without_effect_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("virtual", "paged"):
        LLM(folder, memory="16MiB", kv_cache=name, block_size=8).close()
    told = [each.message for each in caplog.records if "no effect" in each.message]
    assert told == ["block_size has no effect with kv_cache virtual"]


@one_family
def test_bounds_follow_requests_that_end(folder: Path) -> None:
    """Each that ends counts once, in all its completions; the bounds change with the hundredth."""
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with bucketed(folder) as (llm, _, cache):
        before = cache.bounds.bounds
        llm.generate([[1, 2]] * 97, short, use_tqdm=False)
        pair = SamplingParams(n=2, temperature=0, max_tokens=3, ignore_eos=True)
        llm.generate([[1, 2]], pair, use_tqdm=False)
        assert cache.bounds.bounds == before
        llm.generate([[1, 2]], short, use_tqdm=False)
        assert cache.bounds.bounds == (16, before[-1])


@each_shortage(FAMILIES)
def test_in_little_memory(
    folder: Path, expected: list[list[int]], forecast: int | None, preemption_mode: Any
) -> None:
    """The longest request fits and not much more: regions that are too small have to be left."""
    with bucketed(folder) as (llm, _, cache):
        (info,) = llm.engine.models.values()
        num_pages = cache.footprint.most(max(PROMPT_TOKENS), max(PROMPT_TOKENS) + OUTPUT_TOKENS)
    memory = info.weight_bytes + (num_pages + 2) * 4096
    with bucketed(folder, memory, preemption_mode=preemption_mode) as (llm, lane, cache):
        assert tokens(llm.generate(prompts(), GREEDY, use_tqdm=False)) == expected
        if forecast == 2:
            assert cache.num_overflows > 0
            assert lane.num_preemptions > 0
            assert (lane.num_swaps > 0) == (preemption_mode == "swap")


@each_shortage(FAMILIES[::-1])
def test_in_memory_that_is_not_virtual(
    folder: Path, expected: list[list[int]], forecast: int | None, preemption_mode: Any
) -> None:
    """The arena is taken whole, and stays."""
    with bucketed(folder) as (llm, _, cache):
        num_tokens = max(PROMPT_TOKENS) + OUTPUT_TOKENS
        kept_bytes = cache.footprint.most(max(PROMPT_TOKENS), num_tokens) * 4096 + 2 * 4096
    options = {"bucket_memory": kept_bytes, "preemption_mode": preemption_mode}
    with bucketed(folder, guard_pages=False, **options) as (llm, lane, cache):
        assert llm.engine.pool.driver.name == "plain host"
        assert kept_bytes - 2 * 4096 <= cache.kept_bytes <= kept_bytes
        for count in (len(expected), 3):
            outputs = llm.generate(prompts()[:count], GREEDY, use_tqdm=False)
            assert tokens(outputs) == expected[:count]
            check_idle(llm)
        if forecast == 2:
            assert cache.num_overflows > 0
            assert lane.num_preemptions > 0
            assert (lane.num_swaps > 0) == (preemption_mode == "swap")
        longest = SamplingParams(max_tokens=60, ignore_eos=True)
        with pytest.raises(CapacityError, match=r"bytes .* for KV"):
            llm.generate(prompts()[4], longest, use_tqdm=False)


@one_family
def test_memory_that_is_not_virtual_is_for_one_model(folder: Path) -> None:
    options: dict[str, Any] = {"bucket_memory": "1MiB", "guard_pages": False}
    with bucketed(folder, **options) as (llm, _, _):
        with pytest.raises(ConfigError, match="bucket_memory is for one model"):
            llm.engine.add_model(ModelSpec("another", folder))
        assert len(llm.engine.models) == 1
    with (
        pytest.raises(ConfigError, match=r"the smallest region takes .*; raise --bucket-memory"),
        bucketed(folder, bucket_memory="4KiB", guard_pages=False),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"--bucket-memory takes more than the .* give less of it"),
        bucketed(folder, "2MiB", bucket_memory="2MiB", guard_pages=False),
    ):
        pass


@one_family
def test_buckets_of_equal_widths(folder: Path) -> None:
    """They stay, whatever lengths there are."""
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with bucketed(folder, bucket_bounds="equal") as (llm, _, cache):
        assert cache.bounds.bounds == (16, 32, 64, 96, 128)
        llm.generate([[1, 2]] * 100, short, use_tqdm=False)
        assert cache.bounds.bounds == (16, 32, 64, 96, 128)


@pytest.mark.parametrize("forecast", ["none", "short"], indirect=True)
def test_samples_and_beams(folder: Path, expected: list[list[int]], forecast: int | None) -> None:
    """Sequences that fork get copies; with little memory they are preempted together."""
    samples = SamplingParams(n=3, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    asked = [samples, beams.sampling_params()]
    given = [prompts()[1]] * 2
    with LLM(folder, memory="16MiB", kv_cache="paged", **OPTIONS) as llm:
        _, searched = llm.generate(given, asked, use_tqdm=False)
    with bucketed(folder) as (llm, _, cache):
        (info,) = llm.engine.models.values()
        num_pages = cache.footprint.most(40, 40 + OUTPUT_TOKENS, 3)
    memory = info.weight_bytes + num_pages * 4096
    for each in ("16MiB", memory):
        with bucketed(folder, each) as (llm, _, cache):
            sampled, found = llm.generate(given, asked, use_tqdm=False)
            assert [list(each.token_ids) for each in sampled.outputs] == [expected[1]] * 3
            assert [each.token_ids for each in found.outputs] == [
                each.token_ids for each in searched.outputs
            ]


@pytest.fixture
def random_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts that are missing, short, right or long."""
    random = Random(5)
    expect = BucketedCache.expect

    def expected_to_be(
        cache: BucketedCache, slot: int, num_prompt: int, num_total: int, _: Any = None
    ) -> None:
        output = num_total - num_prompt
        length = random.choice((None, 1, 2, 5, output, 2 * output))
        known = None if length is None else Forecast.certain(length)
        expect(cache, slot, num_prompt, num_total, known)

    monkeypatch.setattr(BucketedCache, "expect", expected_to_be)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("random_forecasts")
def test_every_request_ends(seed: int) -> None:
    """The scheduler's rules hold, and the device refuses now and then. But a sequence that moves
    needs both regions, so the earliest request may have to begin anew when it is alone."""
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(seed),
            "bucketed",
            resources,
            names=("small",),
            budget_bytes=(20, 24, 40, 60)[seed] * PAGE_BYTES,
            max_batched_tokens=16,
            faulty=seed % 2 == 1,
            num_ahead=seed % 2,
            preemption_mode=("recompute", "swap")[seed // 2],
            block_size=(1, 3)[seed % 2],
        )
        world.is_in_order = False
        (lane,) = world.scheduler.lanes.values()
        assert isinstance(lane.cache, BucketedCache)
        while len(world.requests) < 20:
            world.arrive()
            world.step()
            lane.cache.check()
        steps_left = 3 * 20 * MAX_TOKENS * 5
        while world.scheduler.has_work:
            world.step()
            lane.cache.check()
            steps_left -= 1
            assert steps_left, "no end"
        assert {t.ending for t in world.requests.values()} <= {"done", "error"}
        assert lane.cache.num_overflows > 0
        world.check_empty()


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 2, "use_beam_search": True}])
@pytest.mark.usefixtures("random_forecasts")
def test_what_fits_alone_is_served(options: dict[str, Any]) -> None:
    """Where there is not a page to spare. `SchedulerWorld.step` fails when a request does."""
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(1),
            "bucketed",
            resources,
            names=("narrow",),
            budget_bytes=1 << 20,
            max_batched_tokens=7,
            block_size=3,
        )
        world.is_in_order = False
        (lane,) = world.scheduler.lanes.values()
        count = SamplingParams(**options).num_sequences
        num_pages = most_pages(lane, 10, 38, count)
        others = world.pool.acquire(
            Owner("others", Kind.WEIGHTS), world.pool.budget_bytes // PAGE_BYTES - num_pages
        )
        assert others is not None
        for number in range(6):
            for _ in range(2):
                world.add(lane, 10, 33 + number, **options)
            world.finish()
        world.pool.release(others)
        world.check_empty()


@pytest.mark.parametrize(
    ("folder", "lengths", "preemption_mode", "is_virtual"),
    [
        (family, *case)
        for number, case in enumerate(
            [("hidden", "swap", True), ("shifting", "recompute", True), ("shifting", "swap", False)]
        )
        for family in (FAMILIES if EVERY_CASE else [FAMILIES[number % 2]])  # in turn
    ],
    indirect=["folder"],
)
@pytest.mark.usefixtures("random_forecasts")
def test_a_crowd_in_short_memory(
    folder: Path, lengths: Lengths, preemption_mode: Any, is_virtual: bool
) -> None:
    """Overflows, preemptions and clients that leave: `soak` checks the books, and that no piece is
    lost; and the tokens are those of an engine with memory for all."""
    with bucketed(folder, max_model_len=96) as (llm, _, cache):
        (info,) = llm.engine.models.values()
        kv_bytes = int(cache.footprint.pages(96)) * 3 * 4096
    sample = Sample(15, 50)
    options: dict[str, Any] = {
        "max_model_len": 96,
        "preemption_mode": preemption_mode,
        "length_prediction": "prior",
    }
    if not is_virtual:
        options |= {"bucket_memory": kv_bytes, "guard_pages": False}
    with bucketed(folder, info.weight_bytes + kv_bytes + 4096, **options) as (llm, _, _):
        result = soak(llm, 50, 96, seed=1, lengths=lengths, sample=sample)
        assert result.num_answered > 20
        assert result.num_left > 0
        assert result.num_preemptions > 0
        assert (result.num_swaps > 0) == (preemption_mode == "swap")
        assert result.buckets is not None
        assert result.buckets.num_overflows > 0
        assert len(result.buckets.bounds) == 4
    with LLM(folder, memory="16MiB", kv_cache="paged", max_model_len=96, **OPTIONS) as llm:
        assert sample.compare(llm) == 15


@one_family
def test_other_tokens_are_found(folder: Path) -> None:
    sample = Sample(1, 1)
    request = Request("a", str(folder), [1, 2], GREEDY, 0.0)
    sample.note(request, [[0] * OUTPUT_TOKENS])
    with (
        LLM(folder, memory="16MiB", kv_cache="paged", **OPTIONS) as llm,
        pytest.raises(InvariantError, match="other tokens"),
    ):
        sample.compare(llm)


def test_recurrent_state_is_refused(tmp_path: Path) -> None:
    save_tiny(HYBRIDS["bamba"](), tmp_path, 2)
    with pytest.raises(ConfigError, match="bucketed has no room for recurrent state"):
        LLM(tmp_path, memory="16MiB", kv_cache="bucketed", **OPTIONS)


@one_family
def test_bounds_in_step_on_two_devices(folder: Path) -> None:
    """Devices that learn from the outputs of both, in one order, have the same buckets."""
    options: dict[str, Any] = {"length_prediction": "prior"}
    with (
        bucketed(folder, **options) as (one, lane, cache),
        bucketed(folder, **options) as (other, other_lane, other_cache),
        bucketed(folder, **options) as (alone, _, alone_cache),
    ):
        (model,) = one.engine.lanes
        for llm in (one, other):
            llm.engine.share_lengths()
        learnt = []
        for turn in range(60):
            llm = (one, other)[turn % 2]
            llm.generate(prompts()[:2], replace(GREEDY, max_tokens=turn % 5 + 1), use_tqdm=False)
            assert (lane if llm is one else other_lane).ended
            taken = llm.engine.take_ended()
            assert not llm.engine.take_ended()
            for each in (one, other):
                each.engine.learn_lengths(model, taken[model])
                each.engine.learn_lengths("another model", taken[model])
            learnt += taken[model]
        assert cache.bounds.bounds == other_cache.bounds.bounds != alone_cache.bounds.bounds
        alone.engine.learn_lengths(model, learnt)
        assert cache.bounds.bounds == alone_cache.bounds.bounds
        assert lane.output_tokens == other_lane.output_tokens > 0
        forecasts = []
        for forecaster in (lane.forecaster, other_lane.forecaster):
            assert forecaster is not None
            forecast = forecaster.forecast(forecaster.arrive(Asked(prompts()[0], 50)))
            assert forecast is not None
            forecasts.append(forecast.quantile(0.9))
        assert forecasts[0] == forecasts[1]


@one_family
def test_lengths_of_which_nothing_depends_are_not_kept(folder: Path) -> None:
    with LLM(folder, memory="16MiB", **OPTIONS) as llm:
        llm.engine.share_lengths()
        llm.generate(prompts()[:2], GREEDY, use_tqdm=False)
        assert not llm.engine.take_ended()
