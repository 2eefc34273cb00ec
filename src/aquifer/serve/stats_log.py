"""Messages about the models and their load, in the words of vLLM's log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aquifer import __version__
from aquifer.engine.reports import EngineStats, MemoryReport, ModelInfo
from aquifer.serve.snapshots import RequestCounts
from aquifer.sizes import format_size

INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


def log_start(infos: Sequence[ModelInfo], aliases: Mapping[str, str], report: MemoryReport) -> None:
    """Log what is served, and how much fits into memory.

    Args:
        infos: the models.
        aliases: served names by the other names that clients may use.
        report: the memory when the models are loaded.
    """
    cache = cache_name(report.device)
    lines = []
    for each in report.devices or (report,):
        lines += [
            f"Aquifer {__version__} on {each.device}: memory budget "
            f"{format_size(each.budget_bytes)} in {each.budget_bytes // each.page_bytes} pages "
            f"of {format_size(each.page_bytes)}",
            f"Available KV cache memory: {format_size(each.free_bytes)}",
        ]
    for info in infos:
        capacity = report.models[info.name].kv_capacity
        names = ", ".join((info.name, *(alias for alias in aliases if aliases[alias] == info.name)))
        lines.append(
            f"Model {info.name}: served as {names}; {info.architecture}, {info.dtype}, "
            f"{info.num_parameters:,} parameters, weights {format_size(info.weight_bytes)}, "
            f"KV {format_size(info.kv_bytes_per_token)} per token, "
            f"max_model_len {info.max_model_len:,}"
        )
        if capacity.num_tokens:
            lines.append(f"Model {info.name}: {cache} size: {capacity.num_tokens:,} tokens")
        if capacity.num_sequences:  # of recurrent state, for a model without KV
            lines.append(
                f"Model {info.name}: Maximum concurrency for {info.max_model_len:,} tokens per "
                f"request: {capacity.num_sequences:.2f}x"
            )
    if len(infos) > 1:
        lines.append(
            "The models share the KV cache memory; each size is that of one model with all of it"
        )
    for line in lines:
        _log.info(line)


def cache_name(device: str | None) -> str:
    """The KV cache in messages, named after the device of a memory report; None if unknown."""
    if device is None:
        return "KV cache"
    return "GPU KV cache" if device.startswith("cuda") else "CPU KV cache"


@dataclass(slots=True)
class _Counts:
    """Counters of one model at some time."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class StatsLog:
    """Throughput, queue and cache of each model, logged at regular intervals.

    A line is at level info if there was traffic since the line before, or if that line showed some;
    otherwise at level debug.

    Args:
        models: the names of the served models.
        device: the device, as in a memory report; None if unknown.
    """

    def __init__(self, models: Iterable[str], device: str | None) -> None:
        self._cache = cache_name(device)
        self._before = {name: _Counts() for name in models}
        self._hit_rates = dict.fromkeys(self._before, 0.0)
        self._had_traffic = dict.fromkeys(self._before, False)

    def add(self, model: str) -> None:
        """Log another model too."""
        self._before[model] = _Counts()
        self._hit_rates[model] = 0.0
        self._had_traffic[model] = False

    def remove(self, model: str) -> None:
        """Log a model no more."""
        for each in (self._before, self._hit_rates, self._had_traffic):
            each.pop(model, None)

    async def run(
        self, read: Callable[[], Awaitable[tuple[EngineStats, Mapping[str, RequestCounts]]]]
    ) -> None:
        """Log every `INTERVAL_S` seconds until cancelled.

        Args:
            read: returns the engine's counters, and what each model has served.
        """
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(INTERVAL_S)
            stats, counts = await read()
            now_s = time.monotonic()
            self.log(stats, counts, now_s - before_s)
            before_s = now_s

    def log(
        self, stats: EngineStats, counts: Mapping[str, RequestCounts], elapsed_s: float
    ) -> None:
        """Log a line for each model.

        Args:
            stats: the engine's counters.
            counts: of each model.
            elapsed_s: seconds since the last call.
        """
        for name in list(self._before):
            has_traffic, line = self._line(
                name, stats, counts.get(name, RequestCounts()), elapsed_s
            )
            is_shown = has_traffic or self._had_traffic[name]
            _log.log(logging.INFO if is_shown else logging.DEBUG, line)
            self._had_traffic[name] = has_traffic

    def _line(
        self, name: str, stats: EngineStats, counts: RequestCounts, elapsed_s: float
    ) -> tuple[bool, str]:
        """Whether a model had traffic since the last call, and its line."""
        before = self._before[name]
        now = self._before[name] = _Counts(
            counts.prompt_tokens,
            counts.generated_tokens,
            stats.num_prefix_queried_tokens.get(name, 0),
            stats.num_prefix_hit_tokens.get(name, 0),
        )
        if (
            now.queried_tokens < before.queried_tokens
        ):  # of an engine process that was started again
            before.queried_tokens = before.hit_tokens = 0
        num_queried = now.queried_tokens - before.queried_tokens
        if num_queried:
            self._hit_rates[name] = (now.hit_tokens - before.hit_tokens) / num_queried
        num_prompt = now.prompt_tokens - before.prompt_tokens
        num_generated = now.generation_tokens - before.generation_tokens
        num_running = stats.num_running.get(name, 0)
        num_waiting = stats.num_waiting.get(name, 0)
        line = (
            f"Model {name}: Avg prompt throughput: {num_prompt / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / elapsed_s:.1f} tokens/s, "
            f"Running: {num_running} reqs, Waiting: {num_waiting} reqs, "
            f"{self._cache} usage: {stats.kv_usage:.1%}, "
            f"Prefix cache hit rate: {self._hit_rates[name]:.1%}"
        )
        return any((num_prompt, num_generated, num_running, num_waiting)), line
