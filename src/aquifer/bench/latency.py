"""Decode latency: the engine's loop, timed step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from aquifer.bench.floor import Cost, Rates
from aquifer.bench.offline import (
    Completed,
    Series,
    ratios,
    run_transformers,
    sampling_params,
    sizes,
)
from aquifer.bench.result import summarize
from aquifer.bench.workload import Workload
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request
from aquifer.errors import ConfigError, EngineError
from aquifer.llm import LLM


@dataclass(slots=True)
class StepTimes:
    """Step times of repeats of one batch."""

    workload: Workload
    ours: Series = field(default_factory=Series)
    theirs: Series | None = None
    first_tokens_s: list[float] = field(default_factory=list)  # until every request has one
    steps_s: list[list[float]] = field(default_factory=list)  # by repeat, then by full step

    def run(self, llm: LLM, *, everything_mapped: bool = False) -> None:
        """Time one more repeat.

        Args:
            llm: the engine; nothing else may run on it.
            everything_mapped: reserve room for the whole outputs after prefill, so that no decode
                step has to map pages.

        Raises:
            ConfigError: the requests never ran all at once.
        """
        steps_s: list[float] = []
        self.ours.measure(lambda: self._run(llm.engine, steps_s, everything_mapped))
        if not steps_s:
            raise ConfigError(
                f"{len(self.workload.prompts)} requests never decoded all at once; give more "
                "--memory, a smaller --batch-size, or a larger --output-len"
            )
        self.steps_s.append(steps_s)

    def run_transformers(self, model: Any) -> None:
        """Time one more repeat of Transformers."""
        self.theirs = self.theirs or Series()
        self.theirs.measure(lambda: run_transformers(model, self.workload))

    @property
    def step_ms(self) -> dict[str, float]:
        """Mean, median and 99th percentile over the steps of all repeats."""
        steps_s = [seconds for repeat in self.steps_s for seconds in repeat]
        return {name: 1e3 * seconds for name, seconds in summarize(steps_s).items()}

    def figures(self, cost: Cost, rates: Rates) -> dict[str, Any]:
        """The figures for the result's file."""
        floor_ms = 1e3 * cost.step_s(self.workload, rates)
        result: dict[str, Any] = {
            **sizes(self.workload),
            "aquifer": {
                **self.ours.figures(self.workload),
                "step_ms": self.step_ms,
                "first_tokens_seconds": self.first_tokens_s,
                "step_seconds": self.steps_s,
            },
            "floor_ms_per_token": floor_ms,
            "times_floor": self.step_ms["median"] / floor_ms,
        }
        if self.theirs is not None:
            result["transformers"] = self.theirs.figures(self.workload)
            result |= ratios(self.workload, self.ours, self.theirs)
        return result

    def _run(self, engine: Engine, steps_s: list[float], everything_mapped: bool) -> Completed:
        """Run the batch, recording the seconds of each step in which all requests decode.

        The time of a step is measured between the returns of two successive calls: on an
        asynchronous device, a call returns when the step before is done.
        """
        (model,) = engine.models
        completed: dict[str, list[int]] = {}
        params = sampling_params(self.workload)
        start = time.perf_counter()
        try:
            for prompt, wanted in zip(self.workload.prompts, params, strict=True):
                request = Request(str(len(completed)), model, prompt, wanted, time.monotonic())
                completed[request.request_id] = []
                engine.add(request)
            self._decode(engine, completed, start, steps_s, everything_mapped)
        finally:
            for request_id in completed:
                engine.abort(request_id)
        return list(completed.values())

    def _decode(
        self,
        engine: Engine,
        completed: dict[str, list[int]],
        start: float,
        steps_s: list[float],
        everything_mapped: bool,
    ) -> None:
        is_reading = True
        before: float | None = None  # end of the last step, if all requests were in it
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error is not None:
                    raise EngineError(output.error)
                completed[output.request_id] += output.token_ids
            if len(outputs) < len(completed):
                before = None
                continue
            if before is not None:
                steps_s.append(now - before)
            before = now
            if is_reading:
                is_reading = False
                self.first_tokens_s.append(now - start)
                if everything_mapped:
                    _map_everything(engine)
                    before = None  # the next step's time would include the mapping


def measure_steps(
    llm: LLM,
    workload: Workload,
    repeats: int,
    *,
    everything_mapped: bool = False,
    transformers: Any = None,
) -> StepTimes:
    """Time a batch, after one warm-up run; alternates with Transformers if a model is given."""
    StepTimes(workload).run(llm)
    times = StepTimes(workload)
    if transformers is not None:
        run_transformers(transformers, workload)
    for _ in range(repeats):
        times.run(llm, everything_mapped=everything_mapped)
        if transformers is not None:
            times.run_transformers(transformers)
    return times


def compare_growth(llm: LLM, workload: Workload, repeats: int) -> tuple[StepTimes, StepTimes]:
    """Time a batch whose KV grows, and the same with all KV mapped before; alternating.

    The two alternate, after one warm-up run.
    """
    StepTimes(workload).run(llm)
    growing, mapped = StepTimes(workload), StepTimes(workload)
    for _ in range(repeats):
        growing.run(llm)
        mapped.run(llm, everything_mapped=True)
    return growing, mapped


def _map_everything(engine: Engine) -> None:
    """Map pages for all tokens that the running requests will write."""
    for lane in engine.lanes.values():
        slots = lane.slots.in_order
        # The last token is never run through the model.
        if not lane.cache.reserve(slots, lane.slots.max_total[slots] - 1):
            raise ConfigError(
                "the pool cannot hold the outputs of all requests; give more --memory"
            )
