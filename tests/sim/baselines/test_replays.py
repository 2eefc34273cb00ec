"""Replays with reserved regions: what is reserved at admission, and what forks copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.tiny_replay import MODEL, PAGE_BYTES, STEPS, config_of

from aquifer.sim.device import StepWork
from aquifer.sim.replay import replay
from aquifer.sim.trace import TraceRequest

REGION_TOKENS = {"orca-max": 256, "orca-pow2": 128, "orca-oracle": 64}
"""Tokens of the region of a sequence with a prompt of 20 and an output of 40, in blocks of four."""

TOKENS_OF_A_PAGE = 8


@pytest.mark.parametrize("options", [{"num_samples": 3}, {"beam_width": 3}])
@pytest.mark.parametrize("manager", REGION_TOKENS)
def test_all_sequences_of_a_request_have_their_regions_when_it_is_admitted(manager, options):
    """Four regions are room for one request of three sequences: the others wait for its end."""
    kv_pages = 4 * REGION_TOKENS[manager] // TOKENS_OF_A_PAGE
    config = config_of(manager, kv_pages, **options)
    result = replay(config, [TraceRequest(0.0, 20, 40)] * 4)
    assert result.num_preemptions == 0
    starts_s = [record.scheduled_s for record in result.records]
    ends_s = [record.finished_s for record in result.records]
    assert starts_s == [0.0, *ends_s[:-1]]
    reserved_bytes = result.kv_budget_bytes - result.averages["free"]
    region_bytes = REGION_TOKENS[manager] // TOKENS_OF_A_PAGE * PAGE_BYTES
    # The sample that computes the prompt ends a step before the others.
    assert reserved_bytes == pytest.approx(3 * region_bytes, rel=0.01)


def test_beams_that_end_leave_their_regions_to_the_beams_that_fork():
    """Another model, whose steps take turns, gets none of them."""
    region_pages = REGION_TOKENS["orca-oracle"] // TOKENS_OF_A_PAGE
    weight_pages = -(-MODEL.weight_bytes // PAGE_BYTES)
    models = {"tiny": MODEL, "other": replace(MODEL, name="other")}
    config = config_of("orca-oracle", 4 * region_pages + weight_pages, beam_width=3)
    requests = [TraceRequest(0.0, 20, 40, name) for name in ("tiny", "other") * 2]
    result = replay(replace(config, models=models), requests)
    assert result.num_preemptions == 0
    starts_s = [record.scheduled_s for record in result.records]
    assert len(set(starts_s)) == 4, "there is room for one at a time"


def test_a_fork_copies_what_it_shares_in_other_caches():
    """Two samples of a prompt of 20 tokens: five blocks of four, with 19 tokens of it in them."""
    copied_bytes = 5 * 4 * MODEL.kv_layout.token_bytes
    works = [
        StepWork(20, 1, 0, 20, sum(range(1, 21))),
        # The other sample copies, and runs the last token of the prompt for itself.
        StepWork(2, 2, 21, 20, 20, copied_bytes=copied_bytes),
        StepWork(2, 2, 22 + 21),
        StepWork(1, 1, 22),
    ]
    config = config_of("orca-oracle", num_samples=2)
    result = replay(config, [TraceRequest(0.0, 20, 3)])
    assert result.duration_s == pytest.approx(sum(map(STEPS.seconds, works)), rel=1e-12)
    sharing = replay(config_of("paged", num_samples=2), [TraceRequest(0.0, 20, 3)])
    copies_s = STEPS.seconds(works[1]) - STEPS.seconds(StepWork(2, 2, 21, 20, 20))
    assert result.duration_s - sharing.duration_s == pytest.approx(copies_s)
