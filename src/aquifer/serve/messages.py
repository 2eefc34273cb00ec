"""Messages between the web process and the engine process.

All can be unpickled without importing torch, which the web process never imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import RequestError

# ---- to the engine process


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request.

    Args:
        request: the request.
        number: of its first completion; the next ones have the next numbers. No other completion of
            this pipe has them.
    """

    request: Request
    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request, or one of its completions; unknown ones are ignored."""

    request_id: str
    index: int | None = None  # the completion's index; None for all


@dataclass(frozen=True, slots=True)
class GetMemory:
    """Ask for a `Memory` report; answers come in the order of the questions."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Pin the KV of a prefix; answered by a `Pinned`, in the order of the questions."""

    model: str
    token_ids: list[int]
    salt: str | None
    client: str  # name of the client that pins it


@dataclass(frozen=True, slots=True)
class Unpin:
    """Unpin a prefix; answered by a `Pinned` of 0 tokens."""

    model: str
    token_ids: list[int]
    salt: str | None


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask whether the engine's loop runs; answered by a `Pong`."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the engine and exit."""


ToEngine = Add | Abort | GetMemory | Pin | Unpin | Ping | Close

# ---- from the engine process


@dataclass(frozen=True, slots=True)
class Ready:
    """All models are loaded; requests are accepted."""

    models: dict[str, ModelInfo]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The engine could not start. The process exits after this."""

    message: str
    is_config: bool  # a `ConfigError`: the operator can fix it by changing an option


@dataclass(frozen=True, slots=True)
class Step:
    """Output of one iteration of the engine loop.

    Hundreds of completions get a token every few milliseconds. To pickle an object for each would
    take longer than a step of a small model, so outputs that are tokens and nothing else are three
    lists of integers.
    """

    numbers: list[int]  # of completions, as in `Add`
    counts: list[int]  # tokens of each of them; empty if all have one
    token_ids: list[int]  # of all of them, one after the other
    outputs: list[TokenOutput]  # all others
    refused: dict[str, RequestError]  # by request id
    stats: EngineStats
    launched: tuple[str, int] | None = None  # model and tokens of the step that was launched

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the numbers and the tokens, each, of outputs that are tokens and nothing else.

        Pre-condition: `counts` is not empty.
        """
        begin = 0
        for number, count in zip(self.numbers, self.counts, strict=True):
            yield number, self.token_ids[begin : begin + count]
            begin += count


@dataclass(frozen=True, slots=True)
class Memory:
    """The answer to `GetMemory`."""

    report: MemoryReport


@dataclass(frozen=True, slots=True)
class Pinned:
    """The answer to `Pin` and `Unpin`: the number of tokens pinned, or the error."""

    answer: int | RequestError


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`."""


FromEngine = LoadProgress | Ready | OpenFailed | Step | Memory | Pinned | Pong
