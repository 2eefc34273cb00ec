"""A server over an engine without a model, whose prompts say how it fails.

    python -m tests.serve.fake_server CHECKPOINT SHUTDOWN_TIMEOUT [--keys K,L] [--port N] [--load] \
        [--processes N] [--devices cpu,cpu] [--placement NAME] [--report-garbage]

It answers every prompt with letters "a" until max_tokens; of several completions, the second one
has letters "b" and ends a token earlier, and so on, and a later one is more probable by token. A
beam search ends with its last step. A prompt that was there before, with the same salt, is cached
but for its last token.

A prompt that begins with "crash" makes the step after its first token raise; one that begins with
"refuse" is refused; one that begins with "lose" ends with an error output. With keys, prefixes are
kept apart by key. With --load it loads until it gets SIGUSR1. With --report-garbage it says in the
end what objects of Aquifer and uvicorn only a collection could have freed since it was ready.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.outputs import TokenLogprobs, TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.policies.placement import DeviceReport, ModelReport
from aquifer.engine.reports import (
    EngineStats,
    KVCapacity,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    ModelMemory,
    ModelState,
    ModelStatus,
)
from aquifer.errors import AquiferError, CapacityError, InvariantError, QueueFullError
from aquifer.memory.pool import Kind
from aquifer.predict.ended import EndedOutput
from aquifer.serve.config import ServerConfig
from aquifer.serve.fleet import LocalFleet
from aquifer.serve.process import EngineLike
from aquifer.serve.server import serve
from aquifer.text import Tokenizer

_STEP_S = 0.002
_PAGE_BYTES = 1024


@dataclass
class _Running:
    request: Request
    text: str
    num_cached_tokens: int
    open: set[int]  # indexes of completions
    num_steps: int = 0


class FakeEngine:
    """An `EngineLike` that makes its outputs up."""

    def __init__(self, spec: ModelSpec) -> None:
        tokenizer = Tokenizer.load(spec.path)
        assert tokenizer is not None
        self.on_launch: Callable[[str, int], None] = lambda _, __: None
        self.on_wait: Callable[[], None] = lambda: None
        self._tokenizer = tokenizer
        self._name = spec.name
        self._running: dict[str, _Running] = {}
        self._seen: set[tuple[str | None, tuple[int, ...]]] = set()
        self._pinned: set[tuple[str | None, tuple[int, ...]]] = set()
        self._num_queried = self._num_hit = 0

    @property
    def models(self) -> dict[str, ModelInfo]:
        info = ModelInfo(self._name, "", "Fake", "float32", 10**6, 320, 0, 0, 1)
        return {self._name: info}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def should_step(self) -> bool:
        return False

    def add(self, request: Request) -> None:
        text = self._tokenizer.decode(request.prompt_token_ids)
        if text.startswith("refuse"):
            raise QueueFullError("too many requests are waiting")
        key = (request.cache_salt, tuple(request.prompt_token_ids))
        num_cached = len(request.prompt_token_ids) - 1 if key in self._seen | self._pinned else 0
        self._seen.add(key)
        self._num_queried += len(request.prompt_token_ids)
        self._num_hit += num_cached
        indexes = set(range(request.params.num_completions))
        self._running[request.request_id] = _Running(request, text, num_cached, indexes)

    def abort(self, request_id: str, index: int | None = None) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        running.open -= running.open.copy() if index is None else {index}
        if not running.open:
            del self._running[request_id]

    def withdraw(self, model: str, most: int) -> list[str]:
        return []  # all run at once

    def keep_alive(self, model: str, seconds: float) -> None:
        """It has no weights."""

    def pin_prefix(self, model: str, token_ids: list[int], salt: str | None, client: str) -> int:
        if self._tokenizer.decode(token_ids).startswith("huge"):
            raise CapacityError("that is too much to keep")
        key = (salt, tuple(token_ids))
        assert model == self._name
        assert key not in self._pinned
        self._pinned.add(key)
        return len(token_ids) - 1

    def unpin_prefix(self, model: str, token_ids: list[int], salt: str | None) -> None:
        assert model == self._name
        self._pinned.discard((salt, tuple(token_ids)))

    idle_s = None

    def prepare(self) -> bool:
        return False

    def ask_for_model(self, name: str) -> None:
        """No client loads one."""
        raise NotImplementedError

    unload_model = pin_model = unpin_model = remove_model = ask_for_model

    def add_model(self, spec: ModelSpec, *, load: bool) -> ModelInfo:
        """No client adds one."""
        raise NotImplementedError

    def step(self) -> list[TokenOutput]:
        time.sleep(_STEP_S)
        self.on_launch(self._name, sum(len(running.open) for running in self._running.values()))
        outputs = []
        for request_id, running in list(self._running.items()):
            running.num_steps += 1
            if running.num_steps > 1 and running.text.startswith("crash"):
                raise InvariantError("told to crash")
            if running.num_steps > 1 and running.text.startswith("lose"):
                outputs.append(
                    TokenOutput(request_id, finish_reason="error", error="lost on purpose")
                )
                del self._running[request_id]
                continue
            of_request = [*self._beams(running), *self._next_tokens(running)]
            if running.num_steps == 1 and of_request:
                of_request[0].num_cached_tokens = running.num_cached_tokens
            for output in of_request:
                if output.finish_reason is not None:
                    self.abort(request_id, output.index)
            outputs += of_request
        return outputs

    def _next_tokens(self, running: _Running) -> Iterator[TokenOutput]:
        params = running.request.params
        if params.use_beam_search:
            return
        wants_logprobs = params.logprobs is not None or params.is_ranked
        for index in sorted(running.open):
            letter = self._letter(index)
            output = TokenOutput(running.request.request_id, [letter], index)
            if wants_logprobs:
                output.logprobs = [TokenLogprobs([letter], [-1 / (index + 1)], [1])]
            if running.num_steps + index == params.max_tokens:
                output.finish_reason = "length"
            yield output

    def _beams(self, running: _Running) -> Iterator[TokenOutput]:
        params = running.request.params
        if params.use_beam_search and running.num_steps == params.max_tokens:
            for index in sorted(running.open):
                yield TokenOutput(
                    running.request.request_id,
                    [self._letter(index)] * params.max_tokens,
                    index,
                    finish_reason="length",
                    cumulative_logprob=-1.0 - index,
                )

    def _letter(self, index: int) -> int:
        (token_id,) = self._tokenizer.encode(chr(ord("a") + index))
        return token_id

    def stats(self) -> EngineStats:
        return EngineStats(
            {self._name: len(self._running)},
            {self._name: 0},
            {self._name: 0},
            0.0,
            {self._name: self._num_queried},
            {self._name: self._num_hit},
        )

    def memory(self) -> MemoryReport:
        """A report in which each completion has one page of KV."""
        used = sum(len(running.open) for running in self._running.values())
        kinds = dict.fromkeys(Kind, 0) | {Kind.KV: used * _PAGE_BYTES}
        capacity = KVCapacity(1000 * _PAGE_BYTES, 1000 * _PAGE_BYTES / 10**6)
        status = ModelStatus(ModelState.RESIDENT, 0, 0)
        kv_bytes = kinds[Kind.KV]
        model = ModelMemory(status, kinds, len(self._running), 0, 0, 0, kv_bytes, 0, capacity)
        free = 1000 - used
        return MemoryReport(
            device="fake",
            page_bytes=_PAGE_BYTES,
            budget_bytes=1000 * _PAGE_BYTES,
            overhead_bytes=0,
            free_bytes=free * _PAGE_BYTES,
            idle_bytes=0,
            retired_bytes=0,
            mapped_pages=used,
            free_pages=free,
            models={self._name: model},
            process_resident_bytes=0,
        )

    def share_lengths(self) -> None:
        """Nothing is learnt here."""

    def take_ended(self) -> dict[str, list[EndedOutput]]:
        """None: nothing is learnt here."""
        return {}

    def learn_lengths(self, model: str, ended: list[EndedOutput]) -> None:
        """Nothing is learnt here."""

    def device_report(self) -> DeviceReport:
        """The model is there."""
        return DeviceReport({self._name: ModelReport(0, is_resident=True)}, 1 << 20, 1 << 20)

    def close(self) -> None:
        self._running.clear()


class OneAtATime(FakeEngine):
    """An engine that runs one request; the others wait, and may be withdrawn."""

    def step(self) -> list[TokenOutput]:
        waiting = dict(list(self._running.items())[1:])
        for request_id in waiting:
            del self._running[request_id]
        outputs = super().step()
        self._running |= waiting
        return outputs

    def withdraw(self, model: str, most: int) -> list[str]:
        assert model == self._name
        withdrawn = list(self._running)[1 : 1 + most]
        for request_id in withdrawn:
            del self._running[request_id]
        return withdrawn

    def device_report(self) -> DeviceReport:
        """The model is there, and requests wait for a slot."""
        waiting = list(self._running.values())[1:]
        oldest_s = min((each.request.arrival_s for each in waiting), default=None)
        model = ModelReport(0, is_resident=True, oldest_s=oldest_s)
        return DeviceReport({self._name: model}, 1 << 20, 1 << 20)


class EmptyEngine(FakeEngine):
    """An engine whose models are all out of service."""

    def __init__(self) -> None:
        self.on_launch = lambda _, __: None
        self.on_wait = lambda: None
        self._running = {}

    @property
    def models(self) -> dict[str, ModelInfo]:
        return {}

    def stats(self) -> EngineStats:
        return EngineStats({}, {}, {}, 0.0, {}, {})

    def device_report(self) -> DeviceReport:
        """No model is there."""
        return DeviceReport({}, 1 << 20, 1 << 20)


def open_fake(config: EngineConfig, _: Callable[[Any], None]) -> EngineLike:
    """Takes the place of `Engine.open`."""
    return FakeEngine(config.models[0]) if config.models else EmptyEngine()


def open_one_at_a_time(config: EngineConfig, _: Callable[[Any], None]) -> EngineLike:
    """Likewise; it has one model."""
    return OneAtATime(config.models[0])


def open_slowly(config: EngineConfig, on_progress: Callable[[Any], None]) -> EngineLike:
    """Loads until it gets SIGUSR1."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    on_progress(LoadProgress(config.models[0].name, 1, 4))
    signal.sigwait([signal.SIGUSR1])
    return open_fake(config, on_progress)


def _main() -> None:
    def on_ready(url: str) -> None:
        if options.report_garbage:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        print(f"Aquifer is ready on {url}", flush=True)

    def on_listening(url: str) -> None:
        urls.append(url)
        print(f"Aquifer listens on {url}", flush=True)

    def on_progress(_: LoadProgress) -> None:
        print(f"Aquifer loads on {urls[0]}", flush=True)

    urls: list[str] = []

    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("shutdown_timeout", type=float)
    parser.add_argument("--keys")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices")
    parser.add_argument("--placement", default="affinity")
    parser.add_argument("--report-garbage", action="store_true")
    options = parser.parse_args()
    engine = EngineConfig(models=(ModelSpec("fake", options.path),))
    try:
        server = ServerConfig(
            port=options.port,
            api_server_count=options.processes,
            devices=options.devices,
            placement=options.placement,
            api_key=options.keys,
            shutdown_timeout_s=options.shutdown_timeout,
        )
        serve(
            engine,
            server,
            on_progress=on_progress,
            on_ready=on_ready,
            on_listening=on_listening,
            fleet=LocalFleet(engine, server, open_slowly if options.load else open_fake),
        )
    except AquiferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if options.report_garbage:
        _report_garbage()


def _report_garbage() -> None:
    gc.collect()
    kinds = (type(each) for each in gc.garbage)
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    for name, count in Counter(names).items():
        if name.startswith(("aquifer.", "uvicorn.")):
            print(f"{count} x {name}", file=sys.stderr)


if __name__ == "__main__":
    _main()
