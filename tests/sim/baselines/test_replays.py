"""Replays with reserved regions: what is reserved at admission."""

from __future__ import annotations

import pytest
from tests.sim.tiny_replay import PAGE_BYTES, config_of

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
