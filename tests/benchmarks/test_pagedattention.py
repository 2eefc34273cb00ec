"""PagedAttention's figures, replayed: what is measured on a replay, and how long replays are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.pagedattention import measures
from benchmarks.pagedattention.figures import sustained_rate
from benchmarks.pagedattention.measures import Figures
from benchmarks.pagedattention.replays import CONVERGED, MOST_DOUBLINGS, Case, Job, Replays
from benchmarks.pagedattention.workloads import representative_blocks
from tests.sim.tiny_replay import STEPS, config_of

from aquifer.sim.device import StepWork
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult, RequestRecord
from aquifer.sim.trace import TraceRequest

JOB = Job("alpaca", "paged", 1.0, 100)


# --- throughput with a queue -----------------------------------------------------------------


def _record(
    scheduled_s: float, first_token_s: float, finished_s: float, output_tokens: int = 20
) -> RequestRecord:
    return RequestRecord("m", 0.0, 5, output_tokens, scheduled_s, first_token_s, finished_s)


def test_capacity_is_that_of_the_second_half_until_the_queue_is_empty():
    """Between 10 s and 14 s: by hand, with outputs that come evenly from the first to the last."""
    records = [
        _record(0.0, 1.0, 9.0, 60),  # before
        _record(0.0, 5.0, 15.0),  # 4 of 10 seconds within
        _record(10.0, 10.0, 12.0),  # all of it
        _record(14.0, 15.0, 30.0),  # after
    ]
    mean_tokens = (60 + 20 + 20 + 20) / 4
    expected = (20 * 4 / 10 + 20) / (14 - 10) / mean_tokens
    assert measures.capacity(ReplayResult(records)) == pytest.approx(expected)
    refused = RequestRecord("m", 0.0, 5, 500)
    assert measures.capacity(ReplayResult([*records, refused])) == pytest.approx(expected)


def test_capacity_of_a_replay_without_a_queue_is_unknown():
    assert math.isnan(measures.capacity(ReplayResult([_record(0.0, 1.0, 9.0)] * 4)))


def test_capacity_of_a_replay_by_hand():
    """Eight sequences at a time, of a prompt token and 33 outputs: 33 steps for each eight."""
    config = config_of("orca-oracle", max_num_seqs=8)
    result = replay(config, [TraceRequest(0.0, 1, 33)] * 80)
    decodes = [StepWork(8, 8, 8 * length) for length in range(2, 34)]
    steps_s = STEPS.seconds(StepWork(8, 8, 0, 8, 8)) + sum(map(STEPS.seconds, decodes))
    assert result.duration_s == pytest.approx(10 * steps_s, rel=1e-9)
    assert measures.capacity(result) == pytest.approx(8 / steps_s, rel=1e-9)


# --- memory ----------------------------------------------------------------------------------


def test_fractions_of_memory():
    averages = dict.fromkeys(("requests", "sequences", "waiting", "free", "retained"), 2.0)
    averages |= {"written": 45.0, "internal": 15.0, "future": 10.0, "external": 30.0}
    result = ReplayResult([], averages=averages | {"shared": 20.0}, kv_budget_bytes=200)
    figures = measures.figures_of(result)
    assert figures["saved_by_sharing"] == pytest.approx(20 / (45 + 15 + 20))
    assert figures["waste"] == pytest.approx((15 + 10 + 30) / (45 + 15 + 10 + 30))
    assert figures["averages"]["written"] == pytest.approx(45 / 200)
    assert figures["averages"]["requests"] == 2
    result.averages["shared"] = 0.0
    assert "saved_by_sharing" not in measures.figures_of(result)


def test_memory_saved_by_samples_is_the_sum_of_shared_blocks():
    """Three samples of a prompt of 33 tokens: two of them share four blocks of eight all along."""
    config = config_of("paged", num_samples=3, block_size=8)
    figures = measures.figures_of(replay(config, [TraceRequest(0.0, 33, 200)]))
    lengths = np.arange(34, 233)
    seconds = STEPS.decode_seconds(3, 3 * lengths)
    expected = 2 * 4 * seconds.sum() / (seconds * (3 * -(-lengths // 8))).sum()
    # The samples are a step apart, which matters in the first and in the last one alone.
    assert figures["saved_by_sharing"] == pytest.approx(expected, rel=0.005)


def test_hits_of_a_cache_without_end():
    """Blocks are known when their prompt has been computed, and only whole ones of the cache."""
    requests = [
        TraceRequest(0.0, 1200, 1, prefix_ids=(1, 2)),
        TraceRequest(0.0, 1100, 1, prefix_ids=(1, 2)),  # asks before the first is computed
        TraceRequest(0.0, 1100, 1, prefix_ids=(1, 3)),
        TraceRequest(0.0, 1024, 1, prefix_ids=(1, 2)),  # all of it is known
        TraceRequest(0.0, 600, 1, prefix_ids=(2,)),  # known only after block 1
    ]
    times_s = [(0, 2), (1, 3), (4, 5), (6, 7), (8, 9)]
    records = [
        RequestRecord("m", 0.0, request.prompt_tokens, 1, float(start), float(first), 10.0)
        for request, (start, first) in zip(requests, times_s, strict=True)
    ]
    records.append(RequestRecord("m", 0.0, 5000, 1))  # refused
    num_tokens = sum(request.prompt_tokens for request in requests)
    found = measures.unbounded_hit_rate([*requests, requests[0]], ReplayResult(records), 16)
    assert found == pytest.approx((512 + 1008) / num_tokens)


# --- lengths of replays ----------------------------------------------------------------------


class ScriptedReplays(Replays):
    """Replays whose figures are a function of the number of requests."""

    def __init__(self, figure: Callable[[Job], float | None]) -> None:
        super().__init__(Path(), 1)
        self.figure = figure
        self.num_runs = 0

    def run(self, what: str, jobs: Iterable[Job]) -> list[Figures]:
        jobs = list(jobs)
        self.num_runs += len(jobs)
        return [{"capacity": self.figure(job), "num_requests": job.num_requests} for job in jobs]


def test_a_length_is_doubled_until_that_changes_the_figure_by_less_than_two_percent():
    """The figure has a transient of 12 / length; doublings change it by 5.7, 2.9 and 1.5 %."""
    replays = ScriptedReplays(lambda job: 1 + 12 / job.num_requests)
    figures = replays.saturated("test", {"paged": JOB})["paged"]
    assert figures["num_requests"] == 800
    assert figures["capacity"] == pytest.approx(1.015)
    convergence = figures["convergence"]
    assert convergence["num_requests"] == [100, 200, 400, 800]
    assert convergence["values"] == pytest.approx([1.12, 1.06, 1.03, 1.015])
    assert convergence["change"] == pytest.approx(0.015 / 1.015)
    assert convergence["is_converged"]


def test_only_what_has_not_converged_is_replayed_again():
    steady = replace(JOB, manager="virtual")
    replays = ScriptedReplays(lambda job: 1 if job.manager == "virtual" else 50 / job.num_requests)
    found = replays.saturated("test", {"steady": steady, "fading": JOB})
    assert found["steady"]["convergence"]["num_requests"] == [100, 200]
    fading = found["fading"]["convergence"]
    assert fading["num_requests"] == [100 * 2**i for i in range(MOST_DOUBLINGS + 1)]
    assert not fading["is_converged"]
    assert fading["change"] == pytest.approx(1)


def test_a_replay_too_short_for_a_queue_is_lengthened():
    replays = ScriptedReplays(lambda job: None if job.num_requests < 400 else 3.0)
    figures = replays.saturated("test", {"paged": JOB})["paged"]
    assert figures["num_requests"] == 800
    assert figures["convergence"]["values"] == ["not reached", "not reached", 3.0, 3.0]


@pytest.mark.parametrize(
    ("values", "num_lengths"),
    [
        ([None, None], 2),  # no rate is slow enough at either length
        ([math.inf, math.inf], 2),
        ([math.inf, 5.0, 5.05], 3),
        ([None, 5.0, 5.05], 3),
        ([5.0, 4.89, 4.8], 3),  # 2.2 %, 1.9 %
    ],
)
def test_when_a_figure_has_converged(values, num_lengths):
    replays = ScriptedReplays(lambda job: None)
    given = iter(values)
    (found,) = replays.converge("test", [Case([JOB], lambda runs: next(given))])
    assert found.values == values
    assert len(found.lengths) == num_lengths
    assert found.change < CONVERGED


def test_the_rate_at_which_a_curve_is_slow():
    curve = [
        {"rate": rate, "normalized_latency": latency_s}
        for rate, latency_s in ((3.0, 0.8), (1.0, 0.1), (2.0, 0.2))
    ]
    assert sustained_rate(curve, 0.2) == pytest.approx(2.0)
    assert sustained_rate(curve, 0.4) == pytest.approx(2.5)  # half of the way, by factors
    assert sustained_rate(curve, 0.09) is None
    assert sustained_rate(curve, 1.0) == math.inf


def test_each_block_of_a_workload_is_like_all_of_it():
    random = np.random.default_rng(0)
    prompts, outputs = random.lognormal(5, 1, (2, 2000)).astype(int) + 1
    requests = [
        TraceRequest(None, int(prompt), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    blocks = representative_blocks(requests, 5)
    assert [len(block) for block in blocks] == [400] * 5
    assert sorted(np.concatenate(blocks).tolist()) == list(range(2000))
    # The means of blocks in a random order differ by a standard error of the mean.
    for values in (outputs, outputs * (prompts + outputs / 2)):
        error = values.std() / 400**0.5
        assert np.std([values[block].mean() for block in blocks]) < 0.4 * error


def test_beam_searches_are_doubled_once():
    replays = ScriptedReplays(lambda job: 1 + 12 / job.num_requests)
    job = Job("alpaca", "virtual", None, 100, beam_width=4)
    convergence = replays.saturated("test", {"a": job})["a"]["convergence"]
    assert convergence["num_requests"] == [100, 200]
    assert not convergence["is_converged"]


def test_finished_jobs_are_kept_for_the_next_run(tmp_path):
    job = Job("alpaca", "virtual", 2.5, 100)
    kept = tmp_path / "jobs"
    Replays(tmp_path, 1, kept).keep(job, {"capacity": 2.5})
    assert Replays(tmp_path, 1, kept).run("test", [job]) == [{"capacity": 2.5}]
