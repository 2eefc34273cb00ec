"""Replays: times that can be worked out by hand, the same outcome with and without skipping ahead,
and memory that is accounted for to the byte."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from tests.sim.tiny_replay import DEVICE, MODEL, PAGE_BYTES, STEPS, config_of

from aquifer.cache.base import KVLayout
from aquifer.errors import ConfigError
from aquifer.sim import averages
from aquifer.sim.config import MANAGERS
from aquifer.sim.device import StepWork
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest, poisson_arrivals


def _requests(seed: int, count: int, rate: float) -> list[TraceRequest]:
    rng = np.random.default_rng(seed)
    lengths = [
        TraceRequest(None, int(rng.integers(1, 90)), int(rng.geometric(0.03)) % 120 + 1)
        for _ in range(count)
    ]
    return poisson_arrivals(lengths, rate, count, seed)


def _growing(seed: int, count: int) -> list[TraceRequest]:
    """Requests with short prompts and long outputs: many are admitted that later do not fit."""
    rng = np.random.default_rng(seed)
    lengths = [TraceRequest(None, 5, int(rng.integers(60, 130))) for _ in range(count)]
    return poisson_arrivals(lengths, 100.0, count, seed)


def _check(result: ReplayResult) -> None:
    for means in (result.averages, result.averages_waiting):
        parts = ("written", "future", "internal", "external", "retained", "free")
        assert min(means[part] for part in parts) >= -1e-6
        total = sum(means[part] for part in parts)
        assert total == pytest.approx(result.kv_budget_bytes) or total == 0


def _same(left: ReplayResult, right: ReplayResult) -> None:
    """Check for equal times, and for equal averages up to the order of sums."""
    assert [asdict(record) for record in left.records] == [asdict(r) for r in right.records]
    for name in ("num_steps", "num_preemptions", "duration_s", "kv_budget_bytes"):
        assert getattr(left, name) == getattr(right, name)
    assert left.averages == pytest.approx(right.averages, rel=1e-9, abs=1e-3)
    assert left.averages_waiting == pytest.approx(right.averages_waiting, rel=1e-9, abs=1e-3)


def test_one_request_by_hand():
    (record,) = (result := replay(config_of(), [TraceRequest(2.0, 100, 3)])).records
    # 64 and 36 tokens of the prompt, the last of which gives the first token; then two more.
    works = [
        StepWork(64, 0, 0, 64, 64 * 65 // 2),
        StepWork(36, 1, 0, 100, 36 * 64 + 36 * 37 // 2),
        StepWork(1, 1, 101),
        StepWork(1, 1, 102),
    ]
    ends_s = 2.0 + np.cumsum([STEPS.seconds(work) for work in works])
    assert (record.arrival_s, record.scheduled_s) == (2.0, 2.0)
    assert record.first_token_s == pytest.approx(ends_s[1], rel=1e-12)
    assert record.finished_s == pytest.approx(ends_s[3], rel=1e-12)
    assert result.normalized_latency_s == pytest.approx((ends_s[3] - 2) / 3)
    assert result.busy_s == pytest.approx(ends_s[3] - 2)
    figures = result.figures()
    assert (figures["completed"], figures["num_steps"]) == (1, 4)
    assert figures["mean_ttft_ms"] == pytest.approx(1e3 * (ends_s[1] - 2))
    assert figures["median_tpot_ms"] == pytest.approx(1e3 * (ends_s[3] - ends_s[1]) / 2)
    written = np.average([64, 100, 101, 102], weights=np.diff(ends_s, prepend=2.0))
    token_bytes = MODEL.kv_layout.token_bytes
    assert result.averages["written"] == pytest.approx(written * token_bytes)
    assert result.averages["requests"] == pytest.approx(1)
    _check(result)


def test_attention_of_a_prompt_in_chunks_by_hand():
    """Each token attends to all up to itself, those of earlier chunks included."""
    slow = replace(DEVICE, operations_per_s=1e7)  # attention of chunks is bound by its operations
    config = config_of(device=slow)
    (record,) = replay(config, [TraceRequest(0.0, 100, 1)]).records
    products_s = 2 * (100 * MODEL.body_parameters + MODEL.head_parameters) / 1e7
    pairs = sum(range(1, 101))
    expected_s = 2 * slow.overhead_s + products_s + pairs * MODEL.attention_operations / 1e7
    assert record.finished_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("seed", range(3))
def test_skipping_ahead_changes_nothing(manager, seed):
    """In pools with room to spare, with little room, and with constant preemption."""
    config = config_of(manager, (400, 90, 45)[seed])
    requests = _growing(seed, 25) if seed == 2 else _requests(seed, 35, rate=30.0 + 30 * seed)
    ahead = replay(config, requests)
    _same(ahead, replay(replace(config, fast_forward=False), requests))
    _check(ahead)
    served = [record for record in ahead.records if record.finished_s is not None]
    assert len(served) == len(requests) or manager not in ("virtual", "paged")
    for record in served:
        assert record.first_token_s is not None
        assert record.arrival_s <= (record.scheduled_s or 0.0) < record.first_token_s
        assert record.finished_s is not None
        assert record.first_token_s <= record.finished_s
    if manager in ("virtual", "paged") and seed == 2:
        assert ahead.num_preemptions > 0


@pytest.mark.parametrize("manager", ["virtual", "paged"])
def test_skipping_ahead_of_many_sequences(manager):
    """More of them than `VirtualCache` maps for in one call, so it maps for some ahead of need."""
    config = config_of(manager, 800, max_num_seqs=64, max_num_batched_tokens=320)
    requests = [TraceRequest(0.0, 5, 60 + i % 7) for i in range(64)]
    ahead = replay(config, requests)
    assert ahead.averages["sequences"] > 48
    _same(ahead, replay(replace(config, fast_forward=False), requests))


def test_skipping_ahead_counts_only_requests_that_will_be_served_as_waiting():
    """One that is refused arrives while another one waits for a slot."""
    config = config_of(kv_pages=20, max_num_seqs=1)
    requests = [TraceRequest(at_s, 5, 60) for at_s in (0.0, 1e-3)]
    requests.append(TraceRequest(0.02, 5, 250))
    ahead = replay(config, requests)
    assert ahead.num_unserved == 1
    _same(ahead, replay(replace(config, fast_forward=False), requests))
    assert ahead.averages["waiting"] < 1


def test_skipping_ahead_stops_where_a_sequence_moves_to_a_larger_region():
    """The copy takes time in its own step, before which another request may arrive."""
    lengths = {"states_lengths": False, "length_prediction": "prior"}
    config = config_of("bucketed", 400, **lengths)
    requests = [TraceRequest(0.3 * i, 5, 8) for i in range(110)]
    requests += [TraceRequest(40.0 + 0.011 * i, 5, 120) for i in range(8)]
    ahead = replay(config, requests)
    _same(ahead, replay(replace(config, fast_forward=False), requests))


def test_averages_do_not_depend_on_when_steps_are_added_up(monkeypatch):
    config, requests = config_of(kv_pages=45, fast_forward=False), _growing(1, 20)
    at_the_end = replay(config, requests)
    assert at_the_end.num_steps < averages.STEPS_PER_SUM
    assert at_the_end.averages_waiting["waiting"] > 0
    monkeypatch.setattr(averages, "STEPS_PER_SUM", 7)
    often = replay(config, requests)
    _same(at_the_end, often)
    assert often.busy_s == pytest.approx(at_the_end.busy_s, rel=1e-12)


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_preempted_requests_come_to_their_end(mode):
    config = config_of("paged", 45, preemption_mode=mode, swap_space_bytes=1 << 20)
    result = replay(config, _growing(0, 40))
    assert result.num_preemptions > 0
    assert all(record.finished_s is not None for record in result.records)
    _check(result)


@pytest.mark.parametrize("next_s", [None, 60.0])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_that_is_alone_goes_on_at_once(mode, next_s):
    """It waits for no arrival, and comes to its end if there is none."""
    requests = [TraceRequest(0.0, 5, 100), TraceRequest(0.0, 5, 150)]
    if next_s is not None:
        requests.append(TraceRequest(next_s, 5, 1))
    config = config_of("paged", 20, preemption_mode=mode, swap_space_bytes=1 << 20)
    result = replay(config, requests)
    assert result.num_preemptions > 0
    first, second, *_ = result.records
    assert first.finished_s is not None
    assert second.finished_s is not None
    # It had some of its tokens before, and computes no more than its KV again.
    longest_s = STEPS.seconds(StepWork(155, 1, 0, 155, 155 * 78))
    most_s = 3 * longest_s + 150 * STEPS.seconds(StepWork(1, 1, 155))
    assert second.finished_s - first.finished_s <= most_s


@pytest.mark.parametrize("options", [{"num_samples": 3}, {"beam_width": 3}])
@pytest.mark.parametrize("manager", ["virtual", "paged", "bucketed", "orca-oracle"])
def test_several_sequences_of_a_request(manager, options):
    config, requests = config_of(manager, 400, **options), _requests(0, 12, rate=10.0)
    result = replay(config, requests)
    assert all(record.finished_s is not None for record in result.records)
    _check(result)
    shares = result.averages["shared"] > 0
    assert shares == (manager in ("virtual", "paged"))
    # The one that has computed the prompt is a step ahead of the others.
    assert result.averages["sequences"] == pytest.approx(3 * result.averages["requests"], rel=0.05)
    _same(result, replay(replace(config, fast_forward=False), requests))


def test_cached_prefixes():
    """As many hits as a cache without bounds has: whole blocks, and never a whole prompt."""
    requests = [
        TraceRequest(float(i), 1200 + i, 4, prefix_ids=ids)
        for i, ids in enumerate([(1, 2), (3,), (1, 4), (1, 2), (3, 5)])
    ]
    model = replace(MODEL, max_tokens=4096)
    config = replace(
        config_of("paged", 2000, max_num_batched_tokens=2048, prefix_caching=True),
        models={"tiny": model},
    )
    result = replay(config, requests)
    assert [record.cached_tokens for record in result.records] == [0, 0, 512, 1024, 512]
    assert result.hit_tokens == 2048
    assert result.queried_tokens == sum(request.prompt_tokens for request in requests)
    assert result.averages["retained"] > 0
    _check(result)
    plain = replay(replace(config, prefix_caching=False), requests)
    assert plain.hit_tokens == 0
    assert plain.averages["retained"] == pytest.approx(0)
    fourth, without = result.records[3], plain.records[3]
    assert fourth.first_token_s is not None
    assert without.first_token_s is not None
    assert fourth.first_token_s < without.first_token_s


@pytest.mark.parametrize("manager", ["virtual", "paged"])
def test_windows_leave_room_for_more(manager: str):
    """Memory adds up, and a model with windows has more sequences at a time than one without."""
    layers = tuple(
        replace(layer, window_tokens=24 if i else None)
        for i, layer in enumerate(MODEL.kv_layout.layers)
    )
    assert len(layers) > 1
    windows = replace(MODEL, kv_layout=KVLayout(layers, MODEL.kv_layout.dtype))
    requests = _growing(3, 40)
    plain, sliding = (
        replay(replace(config_of(manager, 80, prefix_caching=True), models={"m": model}), requests)
        for model in (MODEL, windows)
    )
    for result in (plain, sliding):
        _check(result)
        assert result.figures()["completed"] == len(requests)
    assert sliding.averages["sequences"] > plain.averages["sequences"]
    assert sliding.num_preemptions <= plain.num_preemptions


def test_static_batches():
    """No request joins a running batch, and all of its answers come at once."""
    requests = [
        TraceRequest(0.0, 5, 40),
        TraceRequest(0.0, 5, 10),
        TraceRequest(1e-3, 5, 10),
        TraceRequest(1e-3, 5, 20),
    ]
    static = replay(config_of("static", 130), requests).records
    assert static[0].finished_s == static[1].finished_s
    assert static[2].scheduled_s == static[3].scheduled_s == static[1].finished_s
    assert static[2].finished_s == static[3].finished_s
    orca = replay(config_of("orca-max", 130), requests).records
    assert orca[1].finished_s is not None
    assert orca[0].finished_s is not None
    assert orca[1].finished_s < orca[0].finished_s
    assert orca[2].scheduled_s is not None
    assert orca[2].scheduled_s < orca[1].finished_s


def test_static_batches_of_each_model_end_by_themselves():
    config = replace(config_of("static", 260), models={"tiny": MODEL, "other": MODEL})
    long, short = TraceRequest(0.0, 5, 60, "tiny"), TraceRequest(0.0, 5, 2, "tiny")
    result = replay(config, [long, short, TraceRequest(0.0, 5, 20, "other")])
    first, second, other = (record.finished_s for record in result.records)
    assert first == second
    assert first is not None
    assert other is not None
    assert other < first


def test_managers_differ_as_the_paper_says():
    """Batched requests and waste at a rate that is too high for all (Fig. 2 and 13)."""
    requests = _requests(5, 120, rate=1000.0)
    results = {name: replay(config_of(name, 160), requests) for name in MANAGERS}
    batched = {name: result.averages_waiting["requests"] for name, result in results.items()}
    assert batched["virtual"] > batched["orca-oracle"] > batched["orca-max"]
    assert batched["paged"] > batched["orca-oracle"] >= batched["orca-pow2"] > batched["static"]
    for name in ("virtual", "paged"):
        assert results[name].averages["future"] == 0
    assert results["orca-max"].averages["internal"] > 0
    assert results["orca-oracle"].averages["internal"] == 0
    assert results["orca-oracle"].averages["external"] > 0
    assert results["static"].normalized_latency_s > results["orca-max"].normalized_latency_s


def test_what_could_never_fit_is_refused():
    requests = [TraceRequest(0.0, 250, 7), TraceRequest(0.0, 100, 50), TraceRequest(0.0, 20, 5)]
    result = replay(config_of("paged", 12), requests)
    assert [record.finished_s is None for record in result.records] == [True, True, False]
    assert result.figures()["not_completed"] == 2
    unfinished = replay(config_of("paged", 12), requests[:1])
    assert unfinished.normalized_latency_s == np.inf
    assert unfinished.figures()["mean_ttft_ms"] is None


def test_two_models_share_the_memory():
    other = replace(MODEL, name="other", max_tokens=128)
    config = replace(config_of(kv_pages=150), models={"tiny": MODEL, "other": other})
    requests = [
        replace(request, model="other" if i % 3 else None, output_tokens=9, prompt_tokens=40)
        for i, request in enumerate(_requests(1, 30, rate=100.0))
    ]
    result = replay(config, requests)
    assert [record.model for record in result.records[:3]] == ["tiny", "other", "other"]
    assert all(record.finished_s is not None for record in result.records)
    _check(result)
    _same(result, replay(replace(config, fast_forward=False), requests))


def test_wrong_options():
    requests = [TraceRequest(0.0, 5, 5)]
    with pytest.raises(ConfigError, match="unknown KV cache 'orca'"):
        config_of("orca")
    with pytest.raises(ConfigError, match="preemption_mode swap needs swap_space above 0"):
        config_of(preemption_mode="swap", swap_space_bytes=0)
    with pytest.raises(ConfigError, match="no prefix caching"):
        config_of("orca-max", prefix_caching=True)
    with pytest.raises(ConfigError, match="the weights of tiny take"):
        replay(replace(config_of(), memory_bytes=PAGE_BYTES), requests)
    with pytest.raises(ConfigError, match="asks for a model 'big'; name one with --model big="):
        replay(config_of(), [replace(requests[0], model="big")])
    with pytest.raises(ConfigError, match="has no times; give a --rate"):
        replay(config_of(), [replace(requests[0], arrival_s=None)])
