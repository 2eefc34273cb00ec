"""Parts `prefill`, `decode` and `makespan`: contiguous against paged KV in the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from benchmarks.vattention import flash_infer, paper
from benchmarks.vattention.engines import (
    KV_CACHES,
    Prompts,
    decode,
    describe,
    first_token_s,
    open_llm,
    warm_up,
)
from benchmarks.vattention.kernels import measure_kernel
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import Settings, Shape

from aquifer.bench.offline import run_aquifer
from aquifer.bench.result import summarize

_REPEATED_TOKENS = 65536  # longer prompts are measured twice, shorter ones more often
_LEAST_REPEATS = 2
_MOST_SEQS = 64


def prefill(settings: Settings, record: Record) -> None:
    """Measure whole prompts, and their attention alone (Table 5, Fig. 6)."""
    record.content["paper_s"] = paper.PREFILL_S
    shapes = {str(tokens): Shape(1, tokens, tokens) for tokens in settings.contexts}
    _kernels(settings, record, shapes)
    for kv_cache in KV_CACHES:
        with open_llm(settings, kv_cache, enable_prefix_caching=False) as llm:
            prompts = Prompts(llm)
            first_token_s(llm, [prompts.prompt(min(settings.contexts))])
            cells = {f"{kv_cache}, {tokens} tokens": tokens for tokens in settings.contexts}
            for _, tokens in record.cells(cells):
                repeats = max(min(_REPEATED_TOKENS // tokens, settings.repeats), _LEAST_REPEATS)
                seconds = [first_token_s(llm, [prompts.prompt(tokens)]) for _ in range(repeats)]
                median_s = summarize(seconds)["median"]
                row = {
                    "kv_cache": kv_cache,
                    "context_tokens": tokens,
                    "seconds": seconds,
                    "prefill_s": median_s,
                    "tokens_per_s": tokens / median_s,
                }
                record.add("rows", row | describe(llm))


def decode_steps(settings: Settings, record: Record) -> None:
    """Measure decode steps by batch, and their attention alone (Table 6, Fig. 7)."""
    record.content |= {"paper_ms": paper.DECODE_MS, "context_tokens": settings.decode_tokens}
    shapes = {str(batch): Shape(batch, settings.decode_tokens) for batch in settings.batches}
    _kernels(settings, record, shapes)
    for kv_cache in KV_CACHES:
        with open_llm(settings, kv_cache, enable_prefix_caching=False) as llm:
            prompts = Prompts(llm)
            cells = {f"{kv_cache}, batch {batch}": batch for batch in settings.batches}
            for _, batch in record.cells(cells):
                warm_up(llm, batch)
                # Steps of the first sequences beside the prompts of the others do not count.
                chunks = settings.decode_tokens // llm.engine.limits.max_batched_tokens + 1
                num_outputs = settings.decode_steps + 1 + batch * chunks
                lengths = [settings.decode_tokens] * batch
                times = decode(llm, prompts.workload(lengths, num_outputs))
                step_ms = times.step_ms
                row = {
                    "kv_cache": kv_cache,
                    "batch": batch,
                    "step_ms": step_ms,
                    "num_steps": len(times.steps_s[0]),
                    "tokens_per_s": 1e3 * batch / step_ms["mean"],
                    "prefill_s": times.first_tokens_s[0],
                }
                record.add("rows", row | describe(llm))


def _kernels(settings: Settings, record: Record, shapes: Mapping[str, Shape]) -> None:
    """Measure attention alone: our kernels over both layouts, and FlashInfer's over blocks."""
    sides = [*KV_CACHES, flash_infer.NAME]
    if reason := flash_infer.missing(settings):
        record.leave_out(flash_infer.NAME, reason)
        sides.remove(flash_infer.NAME)
    cells = {
        f"attention, {name}, {side}": (shapes[name], side) for name in shapes for side in sides
    }
    for name, (shape, side) in record.cells(cells):
        if side == flash_infer.NAME:
            try:
                figures = flash_infer.measure(settings, shape)
            except Exception as error:  # such as a kernel that cannot be compiled here
                record.leave_out(name, f"{type(error).__name__}: {error}"[:300])
                continue
        else:
            figures = measure_kernel(settings, shape, paged=side == "paged")
        row = {"side": side, "batch": shape.batch, "context_tokens": shape.tokens}
        record.add("attention", row | figures)
    if settings.on_gpu:
        torch.cuda.empty_cache()  # engines want the memory


def makespan(settings: Settings, record: Record) -> None:
    """Measure the time to serve a set of requests that arrive at once (Fig. 8).

    A request has `context` tokens, of which prompt and output have the ratio of the cell.
    """
    record.content |= {"paper": paper.MAKESPAN, "num_requests": settings.num_requests}
    for context in settings.makespan_contexts:
        for kv_cache in KV_CACHES:
            cells = {
                f"{kv_cache}, {context} tokens, {ratio} : 1": ratio for ratio in settings.ratios
            }
            if not record.has_time:
                for name in cells:
                    record.leave_out(name, "no time was left")
                continue
            seqs = min(settings.num_requests, _MOST_SEQS)
            options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": seqs}
            with open_llm(settings, kv_cache, **options) as llm:
                prompts = Prompts(llm)
                warm_up(llm, seqs)
                for _, ratio in record.cells(cells):
                    num_outputs = max(round(context / (ratio + 1)), 1)
                    lengths = [context - num_outputs] * settings.num_requests
                    workload = prompts.workload(lengths, num_outputs)
                    start_s = time.perf_counter()
                    run_aquifer(llm, workload, 0.0)
                    row = {
                        "kv_cache": kv_cache,
                        "context_tokens": context,
                        "ratio": ratio,
                        "output_tokens": num_outputs,
                        "makespan_s": time.perf_counter() - start_s,
                        "preemptions": sum(llm.engine.stats().num_preemptions.values()),
                    }
                    record.add("rows", row | describe(llm))
