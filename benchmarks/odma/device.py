"""Part `device`: an engine that serves from KV memory of one size, by who reserves it.

Real steps of a real engine, on a GPU or the CPU. Buckets and static reservation have KV memory that
is taken once as ordinary memory of the device (`--bucket-memory`), as on devices without virtual
memory. `paged` and `virtual` have as many bytes of pages.

More requests wait than can be served. What is measured begins when as many outputs have ended as
run at once, so that running requests have all ages, and ends after some seconds. An output
ends by its client, when it is as long as the source says: the scheduler does not know that before,
and learns the length then, as that of an output which ends by itself. Forecasts begin with the
lengths of earlier requests of the same source.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.odma.limited import engine_with_kv_memory
from benchmarks.odma.workloads import saturated_sources
from rich.console import Console

from aquifer.cache.bucketed import BucketedCache, sizes_of
from aquifer.cache.buckets import BucketBounds
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import ConfigError, EngineError
from aquifer.garbage import old_objects_left_out
from aquifer.llm import LLM
from aquifer.predict.choice import make_forecaster
from aquifer.predict.ended import EndedOutput
from aquifer.predict.forecaster import Asked, template_of
from aquifer.sim.trace import TraceRequest

WAYS: dict[str, dict[str, Any]] = {
    "static, the longest context": {"kv_cache": "bucketed"},
    "S3: static buckets": {
        "kv_cache": "bucketed",
        "bucket_bounds": "equal",
        "length_prediction": "prior",
    },
    "ODMA: dynamic buckets": {"kv_cache": "bucketed", "length_prediction": "prior"},
    "paged": {"kv_cache": "paged"},
    "virtual": {"kv_cache": "virtual"},
}
"""By name: options of the engine. Without forecasts, each region holds the longest context."""

_HISTORY = 500
"""Earlier requests of a source, of which the lengths are known."""

_LEAST_BEFORE = 20
"""Outputs that have ended at least before what is measured begins."""

_MOST_BEFORE_S = 10.0
"""After so long, what is measured begins in any case."""

_SAME = ("model", "device", "kv_bytes", "memory_bytes", "context_tokens", "max_seqs", "num_history")
"""Settings that figures must have in common to be compared."""

_PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is served, and on which device.

    Args:
        model: a checkpoint, of which the configuration suffices, or the name of a bundled model.
        device: as for `LLM`.
        kv_bytes: memory for KV.
        memory_bytes: memory of the engine in all; None for 32 GiB more than for KV.
        page_bytes: size of a page; None for the device's own.
        context_tokens: the longest context.
        max_seqs: requests that run at once at most.
        seconds: length of each measurement.
    """

    model: str = str(Path(__file__).resolve().parents[1] / "gpu" / "models" / "llama-3-8b")
    device: str = "cuda"
    kv_bytes: int = 12 << 30
    memory_bytes: int | None = None
    page_bytes: int | None = None
    context_tokens: int = 4096
    max_seqs: int = 1024
    seconds: float = 7.0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request, and how long its output becomes."""

    token_ids: list[int]
    num_outputs: int

    def ended(self) -> EndedOutput:
        """What is learnt from it."""
        asked = Asked(self.token_ids, self.num_outputs, template=template_of(self.token_ids))
        return EndedOutput(len(self.token_ids), self.num_outputs, asked.classes)


def device(
    data: Path, num_requests: int, ways: Sequence[str] | None = None, **given: Any
) -> dict[str, Any]:
    """Serve the sources of `utilisation` in each way, for some seconds each.

    A way that fails is reported, and the others are measured.

    Raises:
        ConfigError: all have failed.

    Args:
        data: folder of the traces.
        num_requests: requests of each source that wait at the start.
        ways: which of `WAYS`; None for all.
        given: fields of `Settings` that are not the default ones.
    """
    settings = Settings(**given)
    ways = list(WAYS) if ways is None else ways
    console = Console()
    sources = saturated_sources(data, settings.context_tokens, _HISTORY + num_requests)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for way in ways:
        options = WAYS[way]
        start_s = time.perf_counter()
        try:
            with _engine(settings, options) as llm:
                _print(console, f"{way}: engine after {time.perf_counter() - start_s:.1f} s")
                for source, requests in sources.items():
                    rows.append({"source": source, "way": way, **_measure(llm, requests, settings)})
                    _print(console, _line(rows[-1]))
        except Exception as error:  # time on the device is limited: go on with the next way
            traceback.print_exc()
            _print(console, f"FAILED: {way}")
            failed[way] = repr(error)
    if len(failed) == len(ways):
        raise ConfigError(f"nothing could be measured: {failed}")
    return {
        **asdict(settings),
        "model": Path(settings.model).name,
        "num_requests": num_requests,
        "num_history": _HISTORY,
        "failed": failed,
        "rows": rows,
    }


def with_earlier(content: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, and what was measured before of other ways on a device of that kind.

    Raises:
        ConfigError: it was measured with other settings.
    """
    differ = {name for name in _SAME if content[name] != earlier[name]}
    if differ:
        raise ConfigError(f"the file was made with other settings: {', '.join(sorted(differ))}")
    measured = {row["way"] for row in content["rows"]}
    kept = [row for row in earlier["rows"] if row["way"] not in measured]
    rows = sorted([*content["rows"], *kept], key=lambda row: list(WAYS).index(row["way"]))
    return {**content, "rows": rows}


def _engine(settings: Settings, options: Mapping[str, Any]) -> AbstractContextManager[LLM]:
    """An engine of the settings; `bucketed` has its KV in memory that is not virtual."""
    has_regions = options["kv_cache"] == "bucketed"
    return engine_with_kv_memory(
        settings.model,
        settings.kv_bytes,
        settings.memory_bytes,
        device=settings.device,
        page_size=settings.page_bytes,
        bucket_memory=settings.kv_bytes if has_regions else None,
        max_model_len=settings.context_tokens,
        max_num_seqs=settings.max_seqs,
        **options,
    )


def _measure(llm: LLM, requests: Sequence[TraceRequest], settings: Settings) -> dict[str, Any]:
    """Serve the requests of one source with an engine that has seen earlier ones of it alone."""
    ((name, info),) = llm.engine.models.items()
    random = np.random.default_rng(0)
    prompts = [
        _Prompt(random.integers(info.vocab_size, size=r.prompt_tokens).tolist(), r.output_tokens)
        for r in requests
    ]
    config = llm.engine.config
    (lane,) = llm.engine.lanes.values()
    lane.forecaster = make_forecaster(config.length_prediction, llm.path)
    if isinstance(lane.cache, BucketedCache) and config.bucket_bounds == "learned":
        lane.cache.bounds = BucketBounds(sizes_of(config.block_size, settings.context_tokens))
    llm.engine.learn_lengths(name, [prompt.ended() for prompt in prompts[:_HISTORY]])
    serving = _Serving(llm, prompts[_HISTORY:], settings)
    with old_objects_left_out():
        try:
            return serving.run()
        finally:
            serving.end()


class _Serving:
    """Requests that wait and run, and what is counted meanwhile.

    Args:
        llm: an idle engine.
        prompts: the requests.
        settings: how long to measure, and the memory for KV.
    """

    def __init__(self, llm: LLM, prompts: Sequence[_Prompt], settings: Settings) -> None:
        self._engine = llm.engine
        self._settings = settings
        ((self._model, info),) = llm.engine.models.items()
        (self._lane,) = llm.engine.lanes.values()
        self._token_bytes = info.kv_bytes_per_token
        self._due = {str(number): prompt for number, prompt in enumerate(prompts)}
        self._left = {name: prompt.num_outputs for name, prompt in self._due.items()}
        self._num_tokens = 0
        self._num_ended = 0

    def run(self) -> dict[str, Any]:
        """Serve until the measurement is over.

        Raises:
            ConfigError: no request was waiting any more before that.
        """
        lane, seconds = self._lane, self._settings.seconds
        for name, prompt in self._due.items():
            self._engine.add(
                Request(name, self._model, prompt.token_ids, _PARAMS, time.monotonic())
            )
        first_s = now_s = time.perf_counter()
        most_running = 0
        while now_s - first_s < _MOST_BEFORE_S:
            if self._num_ended >= max(len(lane.running), _LEAST_BEFORE):
                break
            self._step()
            most_running = max(most_running, len(lane.running))
            now_s = time.perf_counter()
        begun_s, before = now_s, self._counts()
        written = running = 0.0  # times seconds
        step_s = []
        while now_s - begun_s < seconds:
            if not lane.waiting:
                raise ConfigError("too few requests to keep the memory full; give a higher number")
            self._step()
            step_s.append(time.perf_counter() - now_s)
            now_s += step_s[-1]
            written += int(lane.written_tokens.sum()) * step_s[-1]
            running += len(lane.running) * step_s[-1]
            most_running = max(most_running, len(lane.running))
        measured_s = now_s - begun_s
        counts = {name: after - before[name] for name, after in self._counts().items()}
        cache = lane.cache
        return {
            "utilisation": written / measured_s * self._token_bytes / self._settings.kv_bytes,
            "running": running / measured_s,
            "tokens_per_s": counts["output_tokens"] / measured_s,
            "median_step_ms": 1e3 * float(np.median(step_s)),
            "num_steps": len(step_s),
            "before_s": begun_s - first_s,
            "measured_s": measured_s,
            "most_running": most_running,
            "bounds": cache.bounds.bounds if isinstance(cache, BucketedCache) else None,
            **counts,
        }

    def end(self) -> None:
        """End what is left, and check that nothing of it is left.

        Raises:
            InvariantError: pages or regions are not accounted for.
        """
        for name in self._due:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()
        self._engine.pool.check()
        if isinstance(self._lane.cache, BucketedCache):
            self._lane.cache.check_empty()

    def _step(self) -> None:
        """Run a step; outputs that have their length end."""
        ended = []
        for output in self._engine.step():
            name = output.request_id
            if output.error is not None:
                raise EngineError(output.error)
            self._num_tokens += len(output.token_ids)
            self._left[name] -= len(output.token_ids)
            if self._left[name] > 0:
                continue
            prompt = self._due.pop(name)
            self._num_ended += 1
            if output.finish_reason is None:  # else it has the longest context, and has ended
                self._engine.abort(name)
                ended.append(prompt.ended())
        self._engine.learn_lengths(self._model, ended)

    def _counts(self) -> dict[str, int]:
        """What is counted since the start of the engine or of this source."""
        lane, cache = self._lane, self._lane.cache
        return {
            "output_tokens": self._num_tokens,
            "ended": self._num_ended,
            "preemptions": lane.num_preemptions,
            "swaps": lane.num_swaps,
            "migrations": cache.num_overflows if isinstance(cache, BucketedCache) else 0,
            "migrated_bytes": cache.migrated_bytes if isinstance(cache, BucketedCache) else 0,
        }


def _print(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False)


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"  {row['source']}: {row['utilisation']:.1%} of the memory, {row['running']:.0f} requests "
        f"at once, {row['tokens_per_s']:,.0f} tokens/s, {row['median_step_ms']:.2f} ms a step, "
        f"{row['preemptions']} preemptions, {row['migrations']} migrations, "
        f"{row['before_s']:.1f} + {row['measured_s']:.1f} s"
    )
