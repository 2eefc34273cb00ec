"""Requests for many models: arrivals, runs, popularity and size classes as they are stated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from aquifer.errors import ConfigError
from aquifer.sim.device import MODELS
from aquifer.sim.locality import LOCALITIES, TABLE_1, LocalityWorkload, models_by_class
from aquifer.sim.trace import TraceRequest

NAMES = ("a", "b", "c", "d")
LENGTHS = [TraceRequest(None, 10 + i, 5 + i) for i in range(7)]
WORKLOAD = LocalityWorkload(NAMES, LENGTHS, rate=2.0, num_requests=20_000)


def _runs(requests: list[TraceRequest]) -> list[int]:
    return [len(list(run)) for _, run in groupby(request.model for request in requests)]


@pytest.mark.parametrize(("level", "cv"), [("L1", 0.25), ("L2", 0.5), ("L3", 1.0), ("L4", 2.0)])
def test_intervals_have_the_rate_and_the_coefficient_of_variation(level: str, cv: float) -> None:
    requests = WORKLOAD.requests(LOCALITIES[level])
    intervals_s = np.diff([request.arrival_s or 0.0 for request in requests])
    assert intervals_s.min() >= 0
    assert intervals_s.mean() == pytest.approx(0.5, rel=0.05)
    assert intervals_s.std() / intervals_s.mean() == pytest.approx(cv, rel=0.05)


def test_runs_have_the_stated_lengths() -> None:
    runs = {name: _runs(WORKLOAD.requests(level)) for name, level in LOCALITIES.items()}
    assert set(runs["L1"]) == {1}
    assert runs["L3"] == runs["L4"]
    assert np.mean(runs["L3"]) == pytest.approx(4.0, rel=0.05)
    # Each run is halved, rounded up; the last one of each trace is cut.
    halved = [-(-length // 2) for length in runs["L3"][:-1]]
    assert runs["L2"][: len(halved)] == halved


def test_models_of_runs_follow_zipf_among_the_others() -> None:
    popularity = WORKLOAD.popularity
    assert sorted(popularity.values(), reverse=True) == pytest.approx(
        [share / (1 + 1 / 2 + 1 / 3 + 1 / 4) for share in (1, 1 / 2, 1 / 3, 1 / 4)]
    )
    counts = Counter(request.model for request in WORKLOAD.requests(LOCALITIES["L1"]))
    # Each model is drawn in proportion to its weight, unless it came just before.
    expected = {name: share * (1 - share) for name, share in popularity.items()}
    for name in NAMES:
        share = expected[name] / sum(expected.values())
        assert counts[name] / WORKLOAD.num_requests == pytest.approx(share, rel=0.05)


def test_sequences_of_a_batch_arrive_together_with_lengths_of_their_own() -> None:
    requests = replace(WORKLOAD, batch_size=3, num_requests=50).requests(LOCALITIES["L3"])
    assert len(requests) == 150
    for first in range(0, 150, 3):
        of_batch = requests[first : first + 3]
        assert len({(request.arrival_s, request.model) for request in of_batch}) == 1
    lengths = {(request.prompt_tokens, request.output_tokens) for request in requests}
    assert lengths == {(request.prompt_tokens, request.output_tokens) for request in LENGTHS}


def test_the_same_seed_gives_the_same_requests() -> None:
    level = LOCALITIES["L2"]
    assert WORKLOAD.requests(level) == WORKLOAD.requests(level)
    assert replace(WORKLOAD, seed=1).requests(level) != WORKLOAD.requests(level)


def test_models_by_class() -> None:
    models = models_by_class(20)
    assert len(models) == 20
    classes = [
        next(name for name, shapes in TABLE_1.items() if shape in shapes)
        for shape in models.values()
    ]
    assert Counter(classes) == {"1-3B": 6, "4-13B": 12, "14-30B": 2}
    assert len(set(models_by_class(10).values())) == 8  # all of the paper's
    assert models["opt-6.7b"] == models["opt-6.7b-2"] == "opt-6.7b"
    billions = {"1-3B": (1, 4), "4-13B": (4, 14), "14-30B": (14, 31)}
    for name, shapes in TABLE_1.items():
        for shape in shapes:
            low, high = billions[name]
            assert low <= MODELS[shape].weight_bytes / 2e9 < high


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models"):
        LocalityWorkload(["a"], LENGTHS, 1.0, 1)
    with pytest.raises(ConfigError, match="lengths"):
        LocalityWorkload(NAMES, [], 1.0, 1)
    with pytest.raises(ConfigError, match="rate"):
        LocalityWorkload(NAMES, LENGTHS, 0.0, 1)
