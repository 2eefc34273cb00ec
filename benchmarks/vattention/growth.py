"""Parts `overlap` and `reclamation`: what mapping pages costs decode steps and prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.vattention import paper
from benchmarks.vattention.engines import (
    MapCalls,
    Prompts,
    decode,
    describe,
    first_token_s,
    open_llm,
    warm_up,
    ways_of_mapping,
)
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import SEED, Settings

from aquifer.bench.result import summarize
from aquifer.llm import LLM

MAPPED_BEFORE = "mapped before"
OVERLAP_GOAL = {"p99.9_over_median": 1.05}
RECLAMATION_GOAL = {"deferred_over_mapped": 1.01}

_PERCENTILES = (99, 99.9, 100)
_WAIT_S = 0.05  # until the thread that creates pages ahead has done what it was asked for


def overlap(settings: Settings, record: Record) -> None:
    """Measure decode steps of growing sequences, by when their pages are mapped (Fig. 9).

    The last way maps all pages of the outputs before the first step: no step maps any.
    """
    random = np.random.default_rng(SEED)
    low, high = settings.context_tokens
    contexts = random.integers(low, high + 1, settings.num_seqs).tolist()
    record.content |= {
        "paper": paper.OVERLAP,
        "goal": OVERLAP_GOAL,
        "context_tokens": contexts,
        "num_steps": settings.num_steps,
    }
    ways = ways_of_mapping()
    cells = {**ways, MAPPED_BEFORE: next(iter(ways.values()))}
    for name, options in record.cells(cells):
        with open_llm(
            settings,
            "virtual",
            enable_prefix_caching=False,
            max_num_seqs=settings.num_seqs,
            **options,
        ) as llm:
            record.add(
                "rows", {"way": name, **describe(llm), **_steps(llm, settings, contexts, name)}
            )


def _steps(llm: LLM, settings: Settings, contexts: list[int], way: str) -> dict[str, Any]:
    warm_up(llm, settings.num_seqs)
    # The first sequences decode while the prompts of the others are read.
    stagger = sum(contexts) // llm.engine.limits.max_batched_tokens + settings.num_seqs
    workload = Prompts(llm).workload(contexts, settings.num_steps + 1 + stagger)
    with MapCalls(llm.engine.pool.driver) as mapping:
        start_s = time.perf_counter()
        times = decode(llm, workload, everything_mapped=way == MAPPED_BEFORE)
        first_step_s = start_s + times.first_tokens_s[0]
    (steps_s,) = times.steps_s
    steps_ms = [1e3 * seconds for seconds in steps_s[: settings.num_steps]]
    figures = summarize(steps_ms, _PERCENTILES)
    figures["max"] = figures.pop("p100")
    return {
        "step_ms": figures,
        "p99.9_over_median": figures["p99.9"] / figures["median"],
        "map_calls": mapping.figures(first_step_s),
        "num_steps": len(steps_ms),
        "steps_ms": [round(milliseconds, 4) for milliseconds in steps_ms],
    }


def reclamation(settings: Settings, record: Record) -> None:
    """Measure the prefill of a prompt, by where its pages come from (Fig. 10)."""
    record.content |= {
        "paper": paper.RECLAMATION,
        "goal": RECLAMATION_GOAL,
        "prompt_tokens": settings.reclaimed_tokens,
    }
    prepared: dict[str, Callable[[LLM, int], None]] = {
        "created and mapped": _give_all_back,
        "mapped from stock": _unmap_all,
        "deferred": _nothing,
        MAPPED_BEFORE: _map_all,
    }
    with open_llm(settings, "virtual", enable_prefix_caching=False) as llm:
        record.content |= describe(llm)
        prompts = Prompts(llm)
        num_tokens = settings.reclaimed_tokens
        first_token_s(llm, [prompts.prompt(num_tokens)])
        seconds: dict[str, list[float]] = {name: [] for name in prepared}
        pages: dict[str, list[int]] = {name: [] for name in prepared}
        # The ways take turns, so that a change of the clock hits all alike.
        for _, _ in record.cells({f"repeat {i + 1}": i for i in range(settings.repeats)}):
            for name, prepare in prepared.items():
                prompt = prompts.prompt(num_tokens)
                prepare(llm, num_tokens)
                time.sleep(_WAIT_S)  # as long for all: an idle GPU's clock recovers
                with MapCalls(llm.engine.pool.driver) as mapping:
                    seconds[name].append(first_token_s(llm, [prompt]))
                pages[name].append(sum(call[2] for call in mapping.calls))
            record.content["ways"] = {
                name: {
                    "seconds": found,
                    "prefill_s": summarize(found),
                    "mapped_pages": pages[name],
                }
                for name, found in seconds.items()
            }
    medians = {name: summarize(found)["median"] for name, found in seconds.items()}
    for name, median in medians.items():
        record.content["ways"][name]["over_mapped_before"] = median / medians[MAPPED_BEFORE]
    record.save()


def _nothing(_: LLM, __: int) -> None:
    """Leave the pages of the earlier request in the slot."""


def _unmap_all(llm: LLM, _: int) -> None:
    """Unmap the pages of earlier requests; they stay in stock."""
    llm.engine.pool.retired.settle()


def _give_all_back(llm: LLM, num_tokens: int) -> None:
    """Unmap the pages of earlier requests, and give back all that are in stock."""
    _unmap_all(llm, num_tokens)
    llm.engine.pool.trim()


def _map_all(llm: LLM, num_tokens: int) -> None:
    """Map pages for the whole prompt in the slot that the next request gets."""
    (lane,) = llm.engine.lanes.values()
    slot = min(lane.slots.free)  # slots are taken in order
    lane.cache.expect(slot, num_tokens, num_tokens + 1)
    assert lane.cache.reserve(np.array([slot]), np.array([num_tokens]))
