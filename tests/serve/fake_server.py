"""A server over an engine without a model, whose prompts say how it fails.

    python -m tests.serve.fake_server CHECKPOINT SHUTDOWN_TIMEOUT

It answers every prompt with letters "a" until max_tokens. A prompt that begins with "crash" makes
the step after its first token raise; one that begins with "refuse" is refused; one that begins
with "lose" ends with an error output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.request import (
    EngineStats,
    MemoryReport,
    ModelInfo,
    ModelMemory,
    Request,
    TokenOutput,
)
from aquifer.engine.text import Tokenizer
from aquifer.errors import EngineError, InvariantError, QueueFullError
from aquifer.memory.pool import Kind
from aquifer.serve.process import EngineLike
from aquifer.serve.server import ServerConfig, serve

_STEP_S = 0.002
_PAGE_BYTES = 1024


@dataclass
class _Running:
    request: Request
    text: str
    num_tokens: int = 0


class FakeEngine:
    """Follows `EngineLike`."""

    def __init__(self, spec: ModelSpec) -> None:
        tokenizer = Tokenizer.load(spec.path)
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._letter = tokenizer.encode("a")
        self._name = spec.name
        self._running: dict[str, _Running] = {}

    @property
    def models(self) -> dict[str, ModelInfo]:
        info = ModelInfo(self._name, "", "Fake", "float32", 10**6, 320, 0, 0, 1)
        return {self._name: info}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, request: Request) -> None:
        text = self._tokenizer.decode(request.prompt_token_ids)
        if text.startswith("refuse"):
            raise QueueFullError("too many requests are waiting")
        self._running[request.request_id] = _Running(request, text)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def step(self) -> list[TokenOutput]:
        time.sleep(_STEP_S)
        outputs = []
        for request_id, running in list(self._running.items()):
            running.num_tokens += 1
            output = TokenOutput(request_id, list(self._letter))
            if running.num_tokens > 1 and running.text.startswith("crash"):
                raise InvariantError("told to crash")
            if running.num_tokens > 1 and running.text.startswith("lose"):
                output = TokenOutput(request_id, finish_reason="error", error="lost on purpose")
            elif running.num_tokens == running.request.params.max_tokens:
                output.finish_reason = "length"
            if output.finish_reason is not None:
                del self._running[request_id]
            outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats({self._name: len(self._running)}, {self._name: 0}, {self._name: 0}, 0.0)

    def memory(self) -> MemoryReport:
        used = len(self._running)
        kinds = dict.fromkeys(Kind, 0) | {Kind.KV: used * _PAGE_BYTES}
        model = ModelMemory(kinds, used, 0, 0, 0, kinds[Kind.KV], 0)
        free = 100 - used
        return MemoryReport(
            device="fake",
            page_bytes=_PAGE_BYTES,
            budget_bytes=100 * _PAGE_BYTES,
            overhead_bytes=0,
            free_bytes=free * _PAGE_BYTES,
            idle_bytes=0,
            retired_bytes=0,
            mapped_pages=used,
            free_pages=free,
            models={self._name: model},
            process_resident_bytes=0,
        )

    def close(self) -> None:
        self._running.clear()


def open_fake(config: EngineConfig, _: Callable[[Any], None]) -> EngineLike:
    """Takes the place of `Engine.open`."""
    return FakeEngine(config.models[0])


def _main() -> None:
    def on_ready(url: str) -> None:
        print(f"Aquifer is ready on {url}", flush=True)

    def on_death(error: EngineError) -> None:
        print(f"error: {error}", file=sys.stderr, flush=True)

    try:
        serve(
            EngineConfig(models=(ModelSpec("fake", Path(sys.argv[1])),)),
            ServerConfig(port=0, shutdown_timeout_s=float(sys.argv[2])),
            on_progress=lambda _: None,
            on_ready=on_ready,
            on_death=on_death,
            open_it=open_fake,
        )
    except EngineError:
        sys.exit(1)


if __name__ == "__main__":
    _main()
