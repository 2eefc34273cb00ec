"""Replays of requests whose lengths are not known beforehand, with and without forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from aquifer.memory_options import PREDICTION_USES
from aquifer.predict.forecaster import Asked
from aquifer.predict.lengths import NUM_BINS, Forecast
from aquifer.sim.config import LengthPrediction, ReplayConfig
from aquifer.sim.device import DEVICES, MODELS
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest, poisson_arrivals

MODEL = MODELS["llama-2-13b"]
CONFIG = ReplayConfig(
    {"m": MODEL},
    DEVICES["h200"],
    max_num_seqs=512,
    states_lengths=False,
)


@cache
def trace(num_requests: int = 500) -> tuple[TraceRequest, ...]:
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(6, 0.8, num_requests), 10, 2000).astype(int)
    outputs = np.clip(random.lognormal(5.3, 0.9, num_requests), 5, 1500).astype(int)
    pairs = zip(prompts.tolist(), outputs.tolist(), strict=True)
    return tuple(poisson_arrivals([TraceRequest(None, *p) for p in pairs], 7, num_requests, 1))


@cache
def result(
    how: LengthPrediction, gib: int = 18, uses: tuple[str, ...] = PREDICTION_USES
) -> ReplayResult:
    memory_bytes = MODEL.weight_bytes + (gib << 30)
    config = replace(CONFIG, memory_bytes=memory_bytes, length_prediction=how, prediction_uses=uses)
    return replay(config, trace())


class Wrong:
    """A predictor that knows nothing."""

    def __init__(self, says: str) -> None:
        self._says = says
        self._random = np.random.default_rng(5)

    def predict(self, asked: Sequence[Asked]) -> list[Forecast]:
        chosen = {"short": 1, "long": NUM_BINS - 2}
        masses = np.zeros(NUM_BINS)
        masses[chosen.get(self._says, int(self._random.integers(NUM_BINS)))] = 1
        return [Forecast(masses)] * len(asked)


def timing(found: ReplayResult) -> dict[str, Any]:
    """All figures but those of memory: nothing is mapped ahead that will hardly be used."""
    figures = found.figures()
    return {name: figures[name] for name in figures if not name.startswith("averages")}


def goodput(found: ReplayResult) -> float:
    return float(found.figures()["output_throughput"])


def test_preemptions_are_rare_with_forecasts() -> None:
    off, prior, oracle = result("off"), result("prior"), result("oracle")
    for found in (off, prior, oracle):
        assert found.num_unserved == 0
    assert off.num_preemptions > 30
    assert prior.num_preemptions <= 0.4 * off.num_preemptions
    assert oracle.num_preemptions <= 0.3 * off.num_preemptions
    assert goodput(prior) > goodput(off)
    assert goodput(prior) > 0.95 * goodput(oracle)


@pytest.mark.parametrize("says", ["random", "short", "long"])
def test_a_wrong_predictor_costs_little(says: str) -> None:
    off = result("off")
    memory_bytes = MODEL.weight_bytes + (18 << 30)
    config = replace(
        CONFIG, memory_bytes=memory_bytes, length_prediction="prior", predictor=Wrong(says)
    )
    wrong = replay(config, trace())
    assert wrong.num_unserved == 0
    assert goodput(wrong) > 0.95 * goodput(off)


def test_with_enough_memory_nothing_changes() -> None:
    off, prior = result("off", 110), result("prior", 110)
    assert off.num_preemptions == prior.num_preemptions == 0
    assert timing(off) == timing(prior)


def test_each_use_can_be_turned_off() -> None:
    off = result("off")
    unused = result("prior", uses=("cache",))
    assert unused.num_preemptions > 30
    victims = result("prior", uses=("victims",))
    assert 0 < victims.num_preemptions < off.num_preemptions
