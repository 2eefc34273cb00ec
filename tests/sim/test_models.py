"""Replays of several models in one pool: loads that can be worked out by hand, the baselines, and
memory that is accounted for to the byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.sim.tiny_replay import DEVICE, MODEL, PAGE_BYTES, STEPS, config_of

from aquifer.cache.footprint import Footprint
from aquifer.errors import ConfigError
from aquifer.memory.driver.base import Driver
from aquifer.memory.eviction_log import EvictionLog
from aquifer.memory.pool import Kind as PageKind
from aquifer.memory.pool import Owner, PagePool
from aquifer.sim.baselines.evictions import VICTIMS, Eviction, recent_use
from aquifer.sim.config import LoadingConfig, ReplayConfig
from aquifer.sim.device import ModelShape, StepWork
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.locality import LOCALITIES, LocalityWorkload
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest
from aquifer.weights.host_cache import HostCache
from aquifer.weights.parameters import Parameter
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.store import WeightStore

BYTES_PER_S = 1e6
NAMES = ("a", "b", "c")
LOADING = LoadingConfig(BYTES_PER_S)
MODES = {
    "tensor": LOADING,
    "lru": replace(LOADING, eviction="lru"),
    "random": replace(LOADING, eviction="random"),
    "model": replace(LOADING, eviction="model"),
    "split": replace(LOADING, weight_share=0.6),
    "whole": replace(LOADING, is_exclusive=True),
    "keep alive": replace(LOADING, is_exclusive=True, keep_alive_s=0.01),
    "process": replace(LOADING, is_exclusive=True, start_s=0.2),
}


def _num_pages(shape: ModelShape) -> int:
    return sum(-(-num_bytes // PAGE_BYTES) for num_bytes in shape.tensor_bytes)


WEIGHT_PAGES = _num_pages(MODEL)
WEIGHT_BYTES = WEIGHT_PAGES * PAGE_BYTES


def _config(num_pages: int, loading: LoadingConfig = LOADING, **options: object) -> ReplayConfig:
    """A replay of three equal models in so many pages."""
    return replace(
        config_of(**options),  # type: ignore[arg-type]
        models=dict.fromkeys(NAMES, MODEL),
        memory_bytes=num_pages * PAGE_BYTES,
        loading=loading,
    )


def _requests(seed: int, level: str = "L3", count: int = 60) -> list[TraceRequest]:
    random = np.random.default_rng(seed)
    lengths = [
        TraceRequest(None, int(random.integers(1, 90)), int(random.geometric(0.05)) % 60 + 1)
        for _ in range(count)
    ]
    return LocalityWorkload(NAMES, lengths, 8.0, count, seed=seed).requests(LOCALITIES[level])


def _first_step_s(num_tokens: int) -> float:
    return STEPS.seconds(StepWork(num_tokens, 1, 0, num_tokens, num_tokens * (num_tokens + 1) // 2))


def _ttfts(result: ReplayResult) -> list[float]:
    return [(r.first_token_s or np.inf) - r.arrival_s for r in result.records]


# --- loads by hand -------------------------------------------------------------------------------


def test_a_model_is_loaded_when_it_is_asked_for() -> None:
    requests = [TraceRequest(at_s, 10, 2, "b") for at_s in (1.0, 5.0)]
    result = replay(_config(100), requests)
    (load,) = result.loads
    load_s = WEIGHT_BYTES / BYTES_PER_S
    assert (load.model, load.begun_s) == ("b", 1.0)
    assert load.seconds == pytest.approx(load_s)
    assert load.loaded_bytes == load.weight_bytes == WEIGHT_BYTES
    first, second = _ttfts(result)
    assert first == pytest.approx(load_s + _first_step_s(10))
    assert second == pytest.approx(_first_step_s(10))
    figures = result.figures()
    assert (figures["num_loads"], figures["loaded_bytes"]) == (1, WEIGHT_BYTES)
    assert figures["loading_seconds"] == pytest.approx(load_s)


def test_others_run_while_a_model_is_loaded() -> None:
    """Room for all: neither is slower than it would be without the other."""
    requests = [TraceRequest(0.0, 10, 200, "a"), TraceRequest(0.22, 10, 2, "b")]
    result = replay(_config(200), requests)
    alone = replay(_config(200), requests[:1])
    assert [load.model for load in result.loads] == ["a", "b"]
    running, loaded = result.records
    load_s = WEIGHT_BYTES / BYTES_PER_S
    assert running.finished_s is not None
    assert running.finished_s > 0.22 + load_s > (running.first_token_s or 0.0)
    # Two steps of the other model come in between.
    assert alone.records[0].finished_s == pytest.approx(
        running.finished_s, abs=3 * _first_step_s(10)
    )
    assert loaded.first_token_s == pytest.approx(0.22 + load_s, abs=3 * _first_step_s(10))


@pytest.mark.parametrize("manager", ["virtual", "paged", "bucketed"])
def test_a_request_waits_for_memory_that_a_load_has_taken(manager: str) -> None:
    """Its model is there and idle, and another one is being loaded: then that one may go."""
    load_s = WEIGHT_BYTES / BYTES_PER_S
    requests = [
        TraceRequest(0.0, 5, 2, "a"),
        TraceRequest(1.0, 5, 2, "b"),
        TraceRequest(1.0 + load_s / 2, 150, 2, "a"),
    ]
    config = replace(_config(2 * WEIGHT_PAGES + 10), manager=manager)
    result = replay(config, requests)
    assert [load.model for load in result.loads] == ["a", "b"]
    waited = result.records[2]
    assert waited.first_token_s is not None
    assert waited.first_token_s > 1.0 + load_s


def test_models_that_do_not_fit_together_take_turns_after_the_last_arrival() -> None:
    """Two gave way since it: the one that did so first is loaded first."""
    slow = replace(DEVICE, overhead_s=0.02)
    requests = [TraceRequest(0.01 * i, 4, 200, name) for i, name in enumerate("ab")]
    result = replay(_config(WEIGHT_PAGES + 40, device=slow), requests)
    loaded = [load.model for load in result.loads]
    assert loaded == list("ab" * len(loaded))[: len(loaded)]
    assert len(loaded) >= 4
    assert all(record.finished_s is not None for record in result.records)


def test_a_first_token_does_not_wait_for_long_turns() -> None:
    """Two models that only produce tokens take long turns; one with a new request comes next."""
    slow = replace(DEVICE, overhead_s=0.1)
    config = _config(WEIGHT_PAGES + 40, device=slow)
    streams = [TraceRequest(0.01 * i, 4, 200, name) for i, name in enumerate("ab")]
    begun_s = [load.begun_s for load in replay(config, streams).loads]
    load_s = WEIGHT_BYTES / BYTES_PER_S
    assert 4 * load_s > 0.5  # the least time of a turn
    # At first each waits for its first token, and then for a long turn.
    assert begun_s[1] - begun_s[0] < 4 * load_s + 0.1
    assert min(np.diff(begun_s[2:-1])) > 4 * 0.5
    for arrival_s in (6.0, 7.5, 9.0):
        result = replay(config, [*streams, TraceRequest(arrival_s, 4, 2, "c")])
        # One that has waited for long runs for a whole turn; then it is loaded, and has a step.
        assert _ttfts(result)[2] < 4 * load_s + load_s + 3 * 0.1
        assert all(record.finished_s is not None for record in result.records)


def test_new_requests_do_not_starve_those_that_have_streamed() -> None:
    """There is always a new request of another model, and each of them waits for a load."""
    slow = replace(DEVICE, overhead_s=0.1)
    new = [TraceRequest(0.5 + 0.3 * i, 4, 2, "bc"[i % 2]) for i in range(200)]
    requests = [TraceRequest(0.0, 4, 60, "a"), *new]
    result = replay(_config(WEIGHT_PAGES + 40, device=slow), requests)
    finished_s = result.records[0].finished_s
    assert finished_s is not None
    # Six seconds of steps, of which one turn of half a second comes in each long turn.
    assert finished_s < 6.0 / 0.5 * 3.0 < 0.3 * len(new)


def test_turns_are_longer_where_much_kv_is_copied() -> None:
    """They cost copies too, so there are fewer of them although all of it takes longer."""

    def loads_with(link_bandwidth: float) -> int:
        slow = replace(DEVICE, overhead_s=0.1, link_bandwidth=link_bandwidth)
        requests = [TraceRequest(0.01 * i, 4, 200, name) for i, name in enumerate("ab")]
        config = _config(
            WEIGHT_PAGES + 40, device=slow, preemption_mode="swap", swap_space_bytes=1 << 20
        )
        return len(replay(config, requests).loads)

    assert loads_with(1e5) < loads_with(1e9) / 2


def test_only_what_is_missing_is_loaded_again() -> None:
    """A pool that is a few pages too small for two models."""
    num_pages = 2 * WEIGHT_PAGES - 3
    requests = [TraceRequest(float(i), 4, 1, name) for i, name in enumerate("abab")]
    result = replay(_config(num_pages), requests)
    whole = replay(_config(num_pages, MODES["whole"]), requests)
    assert [load.loaded_bytes for load in whole.loads] == [WEIGHT_BYTES] * 4
    assert [load.loaded_bytes for load in result.loads[:2]] == [WEIGHT_BYTES] * 2
    assert 0 < max(load.loaded_bytes for load in result.loads[2:]) < WEIGHT_BYTES
    assert _ttfts(result)[3] < _ttfts(whole)[3]


def test_the_first_load_is_from_disk() -> None:
    loading = replace(LOADING, disk_bytes_per_s=BYTES_PER_S / 4, is_exclusive=True)
    requests = [TraceRequest(float(i), 4, 1, name) for i, name in enumerate("aba")]
    seconds = [load.seconds for load in replay(_config(100, loading), requests).loads]
    load_s = WEIGHT_BYTES / BYTES_PER_S
    assert seconds == pytest.approx([4 * load_s, 4 * load_s, load_s])


def test_a_process_is_started_before_each_load() -> None:
    requests = [TraceRequest(float(i), 4, 1, name) for i, name in enumerate("aab")]
    seconds = [load.seconds for load in replay(_config(100, MODES["process"]), requests).loads]
    assert seconds == pytest.approx([0.2 + WEIGHT_BYTES / BYTES_PER_S] * 2)


def test_weights_are_kept_alive_for_a_time() -> None:
    requests = [TraceRequest(at_s, 4, 1, "a") for at_s in (0.0, 1.0, 1.4, 3.0)]
    loading = replace(LOADING, is_exclusive=True, keep_alive_s=0.5)
    begun = [load.begun_s for load in replay(_config(100, loading), requests).loads]
    assert begun == [0.0, 1.0, 3.0]
    loading = replace(loading, keep_alive_s=None)
    assert len(replay(_config(100, loading), requests).loads) == 1


def test_skipping_ahead_stops_where_weights_are_no_longer_kept_alive() -> None:
    loading = replace(LOADING, keep_alive_s=0.3)
    config = _config(300, loading)
    requests = [TraceRequest(0.0, 4, 1, "a"), TraceRequest(0.22, 4, 200, "b")]
    ahead = replay(config, requests)
    one_by_one = replay(replace(config, fast_forward=False), requests)
    assert ahead.records == one_by_one.records
    assert ahead.averages == pytest.approx(one_by_one.averages, rel=1e-9, abs=1e-3)


def test_skipping_ahead_stops_at_a_request_for_a_model_that_is_not_open() -> None:
    names = tuple(str(number) for number in range(40))
    config = replace(_config(400), models=dict.fromkeys(names, MODEL), max_num_seqs=1)
    requests = [TraceRequest(0.0, 4, 200, "0"), TraceRequest(0.0, 4, 200, "0")]
    requests.append(TraceRequest(0.3, 4, 2, "1"))
    ahead = replay(config, requests)
    assert ahead.records == replay(replace(config, fast_forward=False), requests).records


def test_models_are_loaded_when_the_last_running_request_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It outgrows the memory, which a wrong footprint does not foresee."""
    monkeypatch.setattr(Footprint, "most", lambda self, *args: 1)
    config = _config(WEIGHT_PAGES + 14, manager="paged")
    requests = [TraceRequest(0.0, 2, 125, "a"), TraceRequest(0.3, 2, 1, "b")]
    result = replay(config, requests)
    first, second = result.records
    assert result.num_steps > 100  # nearly all of them for the first one
    assert first.finished_s is None
    assert second.finished_s is not None


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="the weights of a take"):
        replay(_config(WEIGHT_PAGES - 1), [TraceRequest(0.0, 4, 1, "a")])
    # Into the pool, but not into the part of the weights.
    split = replace(LOADING, weight_share=0.5)
    result = replay(_config(2 * WEIGHT_PAGES - 2, split), [TraceRequest(0.0, 4, 1, "a")])
    assert (result.num_unserved, result.loads) == (1, [])


# --- any requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("manager", ["virtual", "paged"])
def test_all_requests_are_served_and_skipping_ahead_changes_nothing(
    mode: str, manager: str
) -> None:
    config = _config(
        2 * WEIGHT_PAGES + 30, MODES[mode], manager=manager, prefix_caching=mode != "whole"
    )
    requests = _requests(seed=3, count=35)
    ahead = replay(config, requests)
    assert len(ahead.served) == len(requests)
    for record in ahead.served:
        assert record.arrival_s <= (record.scheduled_s or 0.0) < (record.first_token_s or 0.0)
    for means in (ahead.averages, ahead.averages_waiting):
        parts = ("written", "future", "internal", "external", "weights", "retained", "free")
        assert min(means[part] for part in parts) >= -1e-6
        total = sum(means[part] for part in parts)
        assert total == pytest.approx(ahead.kv_budget_bytes) or total == 0
    stepwise = replay(replace(config, fast_forward=False), requests)
    assert [asdict(record) for record in ahead.records] == [asdict(r) for r in stepwise.records]
    assert ahead.loads == stepwise.loads
    assert ahead.num_steps == stepwise.num_steps
    assert ahead.averages == pytest.approx(stepwise.averages, rel=1e-9, abs=1e-3)


def test_modes_from_the_least_loading_to_the_most() -> None:
    requests = _requests(seed=5, level="L1", count=120)
    num_pages = 2 * WEIGHT_PAGES + 40
    loaded = {
        mode: sum(load.loaded_bytes for load in replay(_config(num_pages, loading), requests).loads)
        for mode, loading in MODES.items()
    }
    assert loaded["tensor"] < loaded["model"] < loaded["whole"]
    assert loaded["tensor"] <= loaded["random"] < loaded["whole"] <= loaded["keep alive"]


def test_a_fixed_split_keeps_weights_and_the_rest_apart() -> None:
    """Averages over time of each part: neither takes what the other leaves."""
    num_pages = 2 * WEIGHT_PAGES + 30
    split = replace(LOADING, weight_share=(WEIGHT_PAGES + 10) / num_pages)
    requests = _requests(seed=7)
    result = replay(_config(num_pages, split, prefix_caching=True), requests)
    assert len(result.served) == len(requests)
    share_bytes = (WEIGHT_PAGES + 10) * PAGE_BYTES
    assert result.averages["weights"] == pytest.approx(share_bytes)  # with what is held for them
    assert result.averages["retained"] > 0
    # One model fits at a time, so each change of the model is a load.
    shared = replay(_config(num_pages, prefix_caching=True), requests)
    assert sum(load.loaded_bytes for load in shared.loads) < sum(
        load.loaded_bytes for load in result.loads
    )


# --- evictions -----------------------------------------------------------------------------------


@dataclass
class Use:
    """An idle model, needed again with some probability."""

    p: float = 0.5
    is_idle: bool = True
    sensitivity: float = 1.0
    num_evictions: int = 0
    costs_version: object = None

    def probability(self, now_s: float) -> float:
        return self.p

    def on_evict(self) -> None:
        self.num_evictions += 1


@pytest.mark.parametrize("eviction", ["regret", "random", "model"])
def test_choices_of_weights_to_evict(eviction: Eviction) -> None:
    driver: Driver = ModelledDriver(64 * PAGE_BYTES, PAGE_BYTES)
    pool = PagePool(driver, 64 * PAGE_BYTES)
    store = WeightStore(pool, Owner("a", PageKind.WEIGHTS), _tensors(8))
    reuse, use = ReuseStore(HostCache(0, driver.device), Path()), Use()
    member = reuse.register(store, use, {}, {})
    victims = VICTIMS[eviction](
        reuse, member, lambda group: 1e-6, EvictionLog().losses_of(store.owner)
    )
    assert reuse.populate(member) == store.groups
    likely = victims.cheapest(50.0)
    use.p = 0.1
    unlikely = victims.cheapest(50.0)
    assert likely is not None
    assert unlikely is not None
    assert (unlikely < likely) == (eviction != "random")
    assert victims.evict(PAGE_BYTES, 50.0) == (8 if eviction == "model" else 1) * PAGE_BYTES
    assert use.num_evictions == 1
    if eviction == "regret":
        assert store.missing == store.groups[-1:]  # the last one to be used
    elif eviction == "random":
        names = [name for group in store.missing for name in group.names]
        while victims.evict(PAGE_BYTES, 50.0):
            names += [n for g in store.missing for n in g.names if n not in names]
        assert names != sorted(names)
        assert names != sorted(names, reverse=True)
    store.evict()
    store.close()
    pool.close()


def test_the_least_recently_used_goes_first() -> None:
    assert 1 >= recent_use(0.0) > recent_use(1.0) > recent_use(1e6) > 0


def _tensors(count: int) -> list[Parameter]:
    dtype = MODEL.kv_layout.dtype
    return [Parameter(str(i), (PAGE_BYTES // dtype.itemsize,), dtype, ()) for i in range(count)]


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="eviction"):
        replace(LOADING, eviction="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weight_share"):
        replace(LOADING, weight_share=1.0)
    with pytest.raises(ConfigError, match="as a whole"):
        replace(LOADING, is_exclusive=True, weight_share=0.5)
    with pytest.raises(ConfigError, match="bytes per second"):
        LoadingConfig(0.0)
    with pytest.raises(ConfigError, match="reserves its memory"):
        _config(100, manager="orca-max")


assert DEVICE.overhead_s > 0  # of each step, so that no time is 0
