"""What crosses the pipe between the web process and the engine process.

Everything here can be unpickled without importing torch, which the web process never does.
"""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.engine.request import (
    EngineStats,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    Request,
    TokenOutput,
)
from aquifer.errors import RequestError

# ---- to the engine process


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request, or one of its completions; unknown ones are ignored."""

    request_id: str
    index: int | None = None  # of the completion; None for all


@dataclass(frozen=True, slots=True)
class GetMemory:
    """Ask for a `Memory`; answers come in the order of the questions."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the KV of a prefix; answered by a `Pinned`, in the order of the questions."""

    model: str
    token_ids: list[int]
    salt: str | None


@dataclass(frozen=True, slots=True)
class Unpin:
    """End what a `Pin` began; answered by a `Pinned` of no tokens."""

    model: str
    token_ids: list[int]
    salt: str | None


@dataclass(frozen=True, slots=True)
class Close:
    """Give everything back and exit."""


ToEngine = Add | Abort | GetMemory | Pin | Unpin | Close

# ---- from the engine process


@dataclass(frozen=True, slots=True)
class Ready:
    """All models are loaded; requests are welcome."""

    models: dict[str, ModelInfo]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The engine could not start. The process exits after this."""

    message: str
    is_config: bool  # the operator can mend it by another option


@dataclass(frozen=True, slots=True)
class Step:
    """All that one turn of the loop brought.

    Hundreds of sequences get a token every few milliseconds. As objects, these would take longer to
    pickle than a step of a small model takes.
    """

    # By request id, where a token of the completion 0 is all that there is to say.
    token_ids: dict[str, int]
    outputs: list[TokenOutput]  # all others
    refused: dict[str, RequestError]  # by request id
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Memory:
    """The answer to `GetMemory`."""

    report: MemoryReport


@dataclass(frozen=True, slots=True)
class Pinned:
    """The answer to `Pin` and `Unpin`: how many tokens are kept, or why none."""

    answer: int | RequestError


FromEngine = LoadProgress | Ready | OpenFailed | Step | Memory | Pinned
