"""The engine with AVMP's allocators in place of its own managers: the same tokens; requests wait
for slots, and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.cases import covering

from aquifer.bench.soak import check_idle
from aquifer.cache import BASELINES
from aquifer.cache.avmp.manager import AvmpCache
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import RequestOutput
from aquifer.engine.params import BeamSearchParams, SamplingParams
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.step_input import StepInput
from aquifer.llm import LLM

FAMILIES = ("bamba", "mamba2", "gemma2")
"""With KV and states, with states alone, and with KV alone, of which a part has a window."""

OPTIONS: dict[str, Any] = {
    "page_size": "4KiB",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 16,
    "seed": 0,
}
NUM_LAYERS = 3
OUTPUT_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=OUTPUT_TOKENS, ignore_eos=True).sampling_params()
PROMPT_TOKENS = (1, 40, 7, 23, 60, 40, 12, 33, 5, 18)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny((OUR_DECODER | HYBRIDS)[request.param](), folder, 2)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What the model generates with the paged manager."""
    with LLM(folder, memory="16MiB", kv_cache="paged", **OPTIONS) as llm:
        return tokens(llm.generate(prompts(), GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def searched(folder: Path) -> list[list[int]]:
    """What a beam search finds after the second prompt, with the paged manager."""
    with LLM(folder, memory="64MiB", kv_cache="paged", **OPTIONS) as llm:
        (found,) = llm.generate([prompts()[1]], BEAMS, use_tqdm=False)
    return [list(each.token_ids) for each in found.outputs]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def only_lane(llm: LLM) -> tuple[Lane, AvmpCache]:
    (lane,) = llm.engine.lanes.values()
    assert isinstance(lane.cache, AvmpCache)
    return lane, lane.cache


@pytest.mark.parametrize("kv_cache", BASELINES)
def test_the_same_tokens(folder: Path, expected: list[list[int]], kv_cache: str) -> None:
    with LLM(folder, memory="64MiB", kv_cache=kv_cache, **OPTIONS) as llm:
        lane, cache = only_lane(llm)
        assert lane.prefixes is None
        for count in (len(expected), 3):
            outputs = llm.generate(prompts()[:count], GREEDY, use_tqdm=False)
            assert tokens(outputs) == expected[:count]
        assert lane.num_preemptions == 0
        stores = cache.stores.allocator.stores
        assert sum(s.num_slots * s.slot_bytes for s in stores) <= llm.engine.pool.budget_bytes
        assert all(len(store.free) == store.num_slots for store in stores)
        check_idle(llm)


@pytest.mark.parametrize(
    ("folder", "kv_cache", "preemption_mode"),
    covering(FAMILIES, BASELINES, ["swap", "recompute"], strength=2),
    indirect=["folder"],
)
def test_requests_wait_for_slots(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    expected: list[list[int]],
    kv_cache: str,
    preemption_mode: Any,
) -> None:
    """With too little memory for all, in every step no more than the budget is there."""
    with LLM(folder, memory="64MiB", kv_cache=kv_cache, **OPTIONS) as llm:
        (info,) = llm.engine.models.values()
        _, cache = only_lane(llm)
        longest = max(PROMPT_TOKENS) + OUTPUT_TOKENS
        num_pages = cache.footprint.most(max(PROMPT_TOKENS), longest)
        sizes = [store.slot_bytes for store in cache.stores.allocator.stores]
    # Each store has half: of KV for the longest sequence, of states for two.
    free_bytes = 4 * max(num_pages * 4096, 2 * sizes[-1])
    if kv_cache == "avmp-padded":  # slots for the blocks of the longest, and for a few states
        num_blocks = -(-longest // 4) if cache.footprint.token_bytes else 0
        free_bytes = NUM_LAYERS * sizes[0] * (num_blocks + 4)
    with LLM(
        folder,
        memory=info.weight_bytes + free_bytes,
        kv_cache=kv_cache,
        preemption_mode=preemption_mode,
        **OPTIONS,
    ) as llm:
        pool = llm.engine.pool
        most = 0
        plan = Scheduler.plan
        lane, cache = only_lane(llm)

        def planned(scheduler: Scheduler) -> StepInput | None:
            nonlocal most
            found = plan(scheduler)
            most = max(most, len(lane.running))
            assert pool.created_bytes <= pool.budget_bytes
            return found

        monkeypatch.setattr(Scheduler, "plan", planned)
        assert tokens(llm.generate(prompts(), GREEDY, use_tqdm=False)) == expected
        assert most < len(PROMPT_TOKENS)
        stores = cache.stores.allocator.stores
        assert all(len(store.free) == store.num_slots for store in stores)
        check_idle(llm)


@pytest.mark.parametrize("kv_cache", BASELINES)
def test_samples_and_beams(
    folder: Path, expected: list[list[int]], searched: list[list[int]], kv_cache: str
) -> None:
    """Sequences that fork share blocks, and get copies of states."""
    samples = SamplingParams(n=3, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    given, asked = [prompts()[1]] * 2, [samples, BEAMS]
    with LLM(folder, memory="64MiB", kv_cache=kv_cache, **OPTIONS) as llm:
        sampled, found = llm.generate(given, asked, use_tqdm=False)
        assert [list(each.token_ids) for each in sampled.outputs] == [expected[1]] * 3
        assert [list(each.token_ids) for each in found.outputs] == searched
        check_idle(llm)
