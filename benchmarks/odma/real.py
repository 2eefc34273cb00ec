"""Parts `real` and `overhead`: a small model on the CPU, and the scheduler's own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.odma.workloads import CONVERSATIONS
from rich.progress import track

from aquifer.bench.result import summarize
from aquifer.cache import kv_cache
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.config import BUNDLED_MODELS
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.headroom import Headroom
from aquifer.engine.lane import Lane
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.snapshots import asked
from aquifer.llm import LLM
from aquifer.memory.pool import PagePool
from aquifer.predict.ended import EndedOutput
from aquifer.predict.forecaster import Forecaster, LengthForecaster, Outlook
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.trace import read_trace

_NUM_SEQS = 256
_PROMPT_TOKENS, _OUTPUT_TOKENS = 300, 200
_SHRINK = 8
"""The trace's lengths are divided by it, so that a small model on a CPU serves them in minutes."""

_SEQS_AT_ONCE = 10
"""Mean requests that the memory has room for."""


def real(data: Path, num_requests: int) -> dict[str, Any]:
    """Serve requests with a real model in short memory, without forecasts and with them.

    An output ends by a token that is forbidden until then and forced afterwards, so the scheduler
    does not know its length. With the oracle, `max_tokens` says it.
    """
    lengths = [
        (max(each.prompt_tokens // _SHRINK, 1), max(each.output_tokens // _SHRINK, 1))
        for each in read_trace(data / CONVERSATIONS)[:num_requests]
    ]
    longest = max(prompt + output for prompt, output in lengths) + 1
    rows = []
    options: dict[str, Any] = {
        "page_size": "4KiB",
        "max_model_len": longest,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    model = BUNDLED_MODELS["demo"]
    with LLM(model, memory="128MiB", **options) as llm:
        (info,) = llm.engine.models.values()
        (lane,) = llm.engine.lanes.values()
        mean = sum(prompt + output for prompt, output in lengths) // len(lengths)
        num_pages = _SEQS_AT_ONCE * int(lane.cache.footprint.pages(mean))
        memory_bytes = info.weight_bytes + num_pages * llm.engine.pool.page_bytes
        vocab_size = info.vocab_size
    for how in track(("off", "prior", "oracle"), "real"):
        with LLM(model, memory=memory_bytes, length_prediction=how, **options) as llm:
            (lane,) = llm.engine.lanes.values()
            prompts, params = _requests(lengths, vocab_size, is_stated=how == "oracle")
            start_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start_s
            rows.append(
                {
                    "way": how,
                    "preemptions": lane.num_preemptions,
                    "seconds": seconds,
                    "tokens_per_s": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds,
                }
            )
    return {
        "model": "demo",
        "num_requests": num_requests,
        "lengths_divided_by": _SHRINK,
        "memory_bytes": memory_bytes,
        "rows": rows,
    }


def _requests(
    lengths: list[tuple[int, int]], vocab_size: int, *, is_stated: bool
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and parameters by which each output gets its length."""
    random = np.random.default_rng(0)
    last = vocab_size - 1
    prompts = [random.integers(vocab_size - 1, size=prompt).tolist() for prompt, _ in lengths]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=output if is_stated else None,
            min_tokens=output - 1,
            stop_token_ids=[last],
            logit_bias={last: 100.0},
            ignore_eos=True,
        )
        for _, output in lengths
    ]
    return prompts, params


def overhead(_: Path, num_steps: int) -> dict[str, Any]:
    """Time an attempt to admit a request beside many that run, without and with forecasts.

    That is what forecasts add to a step in which a request waits; to others they add nothing. The
    sequences grow by a token from attempt to attempt.
    """
    forecasters: dict[str, Forecaster | None] = {"off": None, "prior": LengthForecaster()}
    rows = []
    for way, forecaster in forecasters.items():
        lane, assembly = _crowded(forecaster)
        group = _group(lane, _NUM_SEQS)
        headroom = Headroom(assembly.room, {lane.name: lane})
        slots = lane.slots.in_order
        seconds = []
        for _step in range(num_steps):
            lane.slots.num_tokens[slots] += 1
            start_s = time.perf_counter()
            headroom.has_room(lane, group, None)
            seconds.append(time.perf_counter() - start_s)
        rows.append({"way": way, "attempt_us": summarize([1e6 * each for each in seconds])})
    forecaster = forecasters["prior"]
    assert forecaster is not None
    outlook = group.outlook
    assert outlook is not None

    def end() -> None:
        _end(forecaster, outlook, 100)

    def end_and_forecast() -> None:
        end()
        forecaster.forecast(outlook)

    ended = _per_call_us(end)
    forecast = _per_call_us(end_and_forecast)
    return {
        "num_seqs": _NUM_SEQS,
        "rows": rows,
        "ended_us": ended,
        "forecast_us": forecast - ended,
    }


def _end(forecaster: Forecaster, outlook: Outlook, num_outputs: int) -> None:
    """An output has ended."""
    forecaster.judge(outlook, num_outputs)
    num_prompt = len(outlook.asked.prompt_token_ids)
    forecaster.learn(EndedOutput(num_prompt, num_outputs, outlook.asked.classes))


def _per_call_us(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    for _ in range(1000):
        call()
    return 1e3 * (time.perf_counter() - start_s)


def _crowded(forecaster: Forecaster | None) -> tuple[Lane, Assembly]:
    """A model with many running sequences, begun at different times."""
    layout = KVLayout((LayerKV(8, 128, 128),) * 32, torch.bfloat16)
    page_bytes = 2 << 20
    budget_bytes = 40000 * page_bytes
    pool = PagePool(ModelledDriver(budget_bytes, page_bytes), budget_bytes, page_bytes)
    assembly = Assembly(pool, 8192)
    lane = assembly.open_lane(
        LaneSpec("m", layout, _NUM_SEQS + 1, 8192, kv_cache("virtual"), forecaster=forecaster)
    )
    random = np.random.default_rng(0)
    if forecaster is not None:
        group = _group(lane, 0)
        assert group.outlook is not None
        for length in random.lognormal(5, 1, 1000).astype(int).tolist():
            _end(forecaster, group.outlook, max(length, 1))
    for number in range(_NUM_SEQS):
        (sequence,) = _group(lane, number).sequences
        slot = lane.assign_slot(sequence)
        lane.begin(sequence)
        lane.slots.num_tokens[slot] += int(random.integers(_OUTPUT_TOKENS))
    return lane, assembly


def _group(lane: Lane, number: int) -> SequenceGroup:
    prompt = np.arange(_PROMPT_TOKENS, dtype=np.int32)
    request = Request(str(number), "m", prompt.tolist(), SamplingParams(max_tokens=4000), 0.0)
    group = SequenceGroup.of(request, number, prompt, seed=0, max_total=_PROMPT_TOKENS + 4000)
    if lane.forecaster is not None:
        group.outlook = lane.forecaster.arrive(asked(group))
    return group
