"""Part `targets`: single figures of long prompts and of prompts that share KV, for both caches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.vattention.engines import (
    KV_CACHES,
    Prompts,
    decode,
    describe,
    first_token_s,
    open_llm,
    warm_up,
)
from benchmarks.vattention.kernels import copy_bandwidth, measure_kernel
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import Settings

from aquifer.bench.workload import Workload
from aquifer.llm import LLM

_DECODE_STEPS = 64


def measure(settings: Settings, record: Record) -> None:
    """Measure the kernels, then all else in one engine for each cache."""
    copy_bytes_per_s = copy_bandwidth(settings)
    record.content["copy_gb_per_s"] = copy_bytes_per_s / 1e9
    cells = {
        f"{shape.name}, {kv_cache}": (shape, kv_cache)
        for shape in (settings.one_row, settings.chunk)
        for kv_cache in KV_CACHES
    }
    for _, (shape, kv_cache) in record.cells(cells):
        figures = measure_kernel(settings, shape, paged=kv_cache == "paged")
        share = 1e9 * figures["gb_per_s"] / copy_bytes_per_s
        record.add("kernels", {"kv_cache": kv_cache, "of_copy": share, **figures})
    measured: dict[str, Callable[[LLM, Prompts, Settings], dict[str, Any]]] = {
        "cached prompt": _cached,
        "shared prefix": _shared,
        "all found": _found,
        "long prompt": _long,
    }
    record.content["engines"] = {}
    for kv_cache in KV_CACHES:
        with open_llm(settings, kv_cache, page_size=None) as llm:  # the engine's own choice
            prompts = Prompts(llm)
            found = record.content["engines"][kv_cache] = describe(llm)
            for name, measure_one in record.cells(measured):
                found[name] = measure_one(llm, prompts, settings)
                _forget(llm)


def _forget(llm: LLM) -> None:
    """Drop all retained prefixes."""
    (lane,) = llm.engine.lanes.values()
    if lane.prefixes is not None:
        lane.prefixes.clear()


def _cached(llm: LLM, prompts: Prompts, settings: Settings) -> dict[str, Any]:
    """The first token of a prompt: computed, found for the first time, and found again.

    The host's core is cold after a prompt was computed, for which it waits, and what it does then
    takes longer. So a prompt is found again both at once and after another one was computed.
    """
    num_tokens = settings.cached_tokens
    first_token_s(llm, [prompts.prompt(num_tokens)])
    prompt = prompts.prompt(num_tokens)
    computed_s = first_token_s(llm, [prompt])
    found_s = [first_token_s(llm, [prompt]) for _ in range(settings.repeats + 1)]
    later_s, other_s = [], []
    for _ in range(settings.repeats):
        first_token_s(llm, [prompts.prompt(num_tokens)])
        later_s.append(first_token_s(llm, [prompt]))
        other = prompts.prompt(num_tokens)  # the process has found one before
        first_token_s(llm, [other])
        other_s.append(first_token_s(llm, [other]))
    return {
        "prompt_tokens": num_tokens,
        "computed_ms": 1e3 * computed_s,
        "first_found_ms": 1e3 * found_s[0],
        "found_again_ms": 1e3 * statistics.median(found_s[1:]),
        "found_later_ms": 1e3 * statistics.median(later_s),
        "other_found_ms": 1e3 * statistics.median(other_s),
    }


def _shared(llm: LLM, prompts: Prompts, settings: Settings) -> dict[str, Any]:
    """The first tokens of prompts that share most of their tokens and arrive together."""
    count, num_shared, num_tokens = settings.shared

    def together(prefix: list[int]) -> float:
        rest = num_tokens - num_shared
        return first_token_s(llm, [prefix + prompts.prompt(rest) for _ in range(count)])

    unknown_s, known_s = [], []
    for _ in range(settings.repeats + 1):
        prefix = prompts.prompt(num_shared)
        unknown_s.append(together(prefix))
        known_s.append(together(prefix))
    return {
        "prompts": count,
        "shared_tokens": num_shared,
        "prompt_tokens": num_tokens,
        # The first of each is a warm-up.
        "prefix_unknown_ms": 1e3 * statistics.median(unknown_s[1:]),
        "prefix_known_ms": 1e3 * statistics.median(known_s[1:]),
    }


def _found(llm: LLM, prompts: Prompts, settings: Settings) -> dict[str, Any]:
    """Prompts that arrive together and are all found: their first tokens, and decode steps."""
    count, num_tokens = settings.found
    chunks = num_tokens // llm.engine.limits.max_batched_tokens + 1
    workload = prompts.workload([num_tokens] * count, _DECODE_STEPS + count * chunks)
    short = Workload(workload.prompts, [2] * count)
    warm_up(llm, count)
    computed_s = first_token_s(llm, workload.prompts)
    found = decode(llm, workload)
    again_s = [decode(llm, short).first_tokens_s[0] for _ in range(settings.repeats)]
    return {
        "prompts": count,
        "prompt_tokens": num_tokens,
        "computed_ms": 1e3 * computed_s,
        "first_tokens_ms": 1e3 * found.first_tokens_s[0],
        # The first of these has to unmap what the outputs before have left behind the prompts.
        "first_tokens_again_ms": 1e3 * statistics.median(again_s),
        "step_ms": found.step_ms,
    }


def _long(llm: LLM, prompts: Prompts, settings: Settings) -> dict[str, Any]:
    """One long request: its prefill, and its decode steps."""
    warm_up(llm, 1)
    times = decode(llm, prompts.workload([settings.long_tokens], _DECODE_STEPS + 1))
    return {
        "prompt_tokens": settings.long_tokens,
        "prefill_s": times.first_tokens_s[0],
        "step_ms": times.step_ms,
    }
