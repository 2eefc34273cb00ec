"""Part `served`: the conversation trace with a real engine in short memory, by forecasts.

Requests arrive at the trace's times, divided by a speed: a small model on a GPU is several times as
fast as the 13B of the replays, so with the trace's own times it would have two requests at once.
The bounds of goodput are divided by it too.

First the trace is served with memory for all, and what KV has of the pool is noted at each step:
the demand. Then KV has a part of the demand's 95th percentile over time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.odma.limited import engine_with_kv_memory
from benchmarks.odma.replays import GOOD, SHARE_OF_P95
from benchmarks.odma.workloads import CONVERSATIONS, num_good, recorded
from rich.console import Console

from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import EngineError
from aquifer.garbage import old_objects_left_out
from aquifer.llm import LLM
from aquifer.memory.pool import Kind, Owner
from aquifer.predict.ended import EndedOutput
from aquifer.predict.forecaster import Asked, template_of
from aquifer.sim.results import RequestRecord
from aquifer.sim.trace import TraceRequest

WAYS = ("off", "prior", "oracle")

_MODEL = str(Path(__file__).resolve().parents[1] / "gpu" / "models" / "qwen3-0.6b")
_PLENTY_BYTES = 32 << 30
_CONTEXT_TOKENS = 4096
_MAX_SEQS = 256


def served(
    data: Path,
    num_requests: int,
    model: str = _MODEL,
    device: str = "cuda",
    speed: float = 6.0,
    kv_bytes: int = _PLENTY_BYTES,
    memory_bytes: int | None = None,
    page_bytes: int | None = None,
    context_tokens: int = _CONTEXT_TOKENS,
    max_seqs: int = _MAX_SEQS,
) -> dict[str, Any]:
    """Serve the first requests of the trace with memory for all, and in short memory in each way.

    Args:
        data: folder of the traces.
        num_requests: of the trace.
        model: a checkpoint, of which the configuration suffices, or the name of a bundled model.
        device: as for `LLM`.
        speed: what the trace's times are divided by.
        kv_bytes: memory for the KV of all requests at once.
        memory_bytes: memory of the engine in all; None for 32 GiB more than for KV.
        page_bytes: size of a page; None for the device's own.
        context_tokens: the longest context.
        max_seqs: requests that run at once at most.
    """
    requests = recorded(data / CONVERSATIONS, context_tokens, num_requests)
    options = {
        "device": device,
        "page_size": page_bytes,
        "max_model_len": context_tokens,
        "max_num_seqs": max_seqs,
    }
    console = Console()
    found: dict[str, Any] = {}
    for way in ("plenty", *WAYS):
        how = "off" if way == "plenty" else way
        with engine_with_kv_memory(
            model, kv_bytes, memory_bytes, length_prediction=how, **options
        ) as llm:
            run = _Run(llm, requests, speed, states_lengths=how == "oracle")
            with old_objects_left_out():
                run.serve()
            row = {"way": way, "kv_bytes": kv_bytes, **run.figures()}
        if way == "plenty":
            demand = run.demand()
            found = {**demand, "rows": []}
            kv_bytes = int(SHARE_OF_P95 * demand["p95_bytes"])
        found["rows"].append(row)
        goodput = ", ".join(f"{each:.2f}" for each in row["goodput"])
        console.print(
            f"{way}: {row['kv_bytes'] / 2**30:.2f} GiB for KV, {row['preemptions']} preemptions, "
            f"goodput {goodput}, {row['median_step_ms']:.2f} ms a step",
            highlight=False,
        )
    return {
        "model": Path(model).name,
        "device": device,
        "trace": CONVERSATIONS,
        "num_requests": len(requests),
        "speed": speed,
        "share_of_p95": SHARE_OF_P95,
        "good_bounds_s": [[bound / speed for bound in bounds] for bounds in GOOD],
        **found,
    }


class _Run:
    """The requests in one engine, each from its arrival to its end.

    An output ends by its client, when it is as long as the trace says: the scheduler does not know
    that before, and learns the length then, as that of an output which ends by itself.

    Args:
        llm: an idle engine with one model.
        requests: in order of arrival.
        speed: what their times are divided by.
        states_lengths: whether `max_tokens` says how long each output becomes.
    """

    def __init__(
        self, llm: LLM, requests: Sequence[TraceRequest], speed: float, *, states_lengths: bool
    ) -> None:
        self._engine = llm.engine
        self._speed = speed
        self._states_lengths = states_lengths
        ((self._model, info),) = llm.engine.models.items()
        (self._lane,) = llm.engine.lanes.values()
        random = np.random.default_rng(0)
        self._prompts = [
            random.integers(info.vocab_size, size=each.prompt_tokens).tolist() for each in requests
        ]
        self._records = [
            RequestRecord(
                self._model, (each.arrival_s or 0.0) / speed, each.prompt_tokens, each.output_tokens
            )
            for each in requests
        ]
        self._left = {str(number): each.output_tokens for number, each in enumerate(requests)}
        self._kv: list[tuple[float, int]] = []  # seconds of each step, bytes of KV after it
        self._step_s: list[float] = []
        self._seconds = 0.0

    def serve(self) -> None:
        """Serve all requests.

        Raises:
            EngineError: one has failed.
        """
        due = deque(range(len(self._records)))
        owner = Owner(self._model, Kind.KV)
        start_s = last_s = time.perf_counter()
        while self._left:
            while due and self._records[due[0]].arrival_s <= last_s - start_s:
                self._add(due.popleft())
            if self._engine.has_work:
                self._take(start_s)
                now_s = time.perf_counter()
                self._step_s.append(now_s - last_s)
            else:
                time.sleep(max(self._records[due[0]].arrival_s - (last_s - start_s), 0.0))
                now_s = time.perf_counter()
            self._kv.append((now_s - last_s, self._engine.pool.owned_bytes(owner)))
            last_s = now_s
        self._seconds = last_s - start_s
        while self._engine.has_work:  # what was in flight at the end
            self._engine.step()
        self._engine.pool.check()

    def figures(self) -> dict[str, Any]:
        """What a row has of the run."""
        records = self._records
        waits = [r.first_token_s - r.arrival_s for r in records if r.first_token_s is not None]
        ends = [r.finished_s - r.arrival_s for r in records if r.finished_s is not None]
        return {
            "preemptions": self._lane.num_preemptions,
            "swaps": self._lane.num_swaps,
            "seconds": self._seconds,
            "tokens_per_s": sum(r.output_tokens for r in records) / self._seconds,
            "goodput": [
                num_good(records, *(bound / self._speed for bound in bounds)) / self._seconds
                for bounds in GOOD
            ],
            "mean_ttft": 1e3 * float(np.mean(waits)),
            "p99_ttft": 1e3 * float(np.percentile(waits, 99)),
            "mean_e2el": 1e3 * float(np.mean(ends)),
            "median_step_ms": 1e3 * float(np.median(self._step_s)),
        }

    def demand(self) -> Mapping[str, int]:
        """Bytes of KV in use: at most, on average and at most in 95 % of the time."""
        seconds, num_bytes = np.array(self._kv).T
        order = np.argsort(num_bytes)
        passed = np.cumsum(seconds[order]) / seconds.sum()
        return {
            "demand_bytes": int(num_bytes.max()),
            "mean_bytes": int(np.average(num_bytes, weights=seconds)),
            "p95_bytes": int(num_bytes[order][np.searchsorted(passed, 0.95)]),
        }

    def _add(self, number: int) -> None:
        """A request has arrived."""
        record = self._records[number]
        params = SamplingParams(
            temperature=0,
            max_tokens=record.output_tokens if self._states_lengths else None,
            ignore_eos=True,
        )
        prompt = self._prompts[number]
        request = Request(str(number), self._model, prompt, params, time.monotonic())
        self._engine.add(request)

    def _take(self, start_s: float) -> None:
        """Run a step; outputs that have their length end."""
        outputs = self._engine.step()
        now_s = time.perf_counter() - start_s
        ended = []
        for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
            name = output.request_id
            if name not in self._left or not output.token_ids:
                continue
            record = self._records[int(name)]
            if record.first_token_s is None:
                record.first_token_s = now_s
            self._left[name] -= len(output.token_ids)
            if self._left[name] > 0:
                continue
            record.finished_s = now_s
            del self._left[name]
            if output.finish_reason is None:
                self._engine.abort(name)
                ended.append(self._ended(int(name)))
        self._engine.learn_lengths(self._model, ended)

    def _ended(self, number: int) -> EndedOutput:
        """What is learnt from a request."""
        prompt, record = self._prompts[number], self._records[number]
        asked = Asked(prompt, record.output_tokens, template=template_of(prompt))
        return EndedOutput(len(prompt), record.output_tokens, asked.classes)
