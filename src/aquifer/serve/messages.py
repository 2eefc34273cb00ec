"""Messages between the processes of a server.

A server's first process is at one end of each pipe. At the other is the engine process or, where
there are several, a web process. All messages can be unpickled without importing torch, which only
the engine process imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aquifer.config import ModelSpec
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.policies.placement import DeviceReport
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import AquiferError, UnavailableError
from aquifer.predict.ended import EndedOutput

_NUMBERS_OF_A_PROCESS = 1 << 40
"""Completions that a web process can number."""


def first_number(process: int) -> int:
    """The number of the first completion of a web process.

    Args:
        process: the web process's serial number; each that is started has another one.
    """
    return process * _NUMBERS_OF_A_PROCESS


def process_of(number: int) -> int:
    """The serial number of the web process that a completion is of."""
    return number // _NUMBERS_OF_A_PROCESS


# ---- to the engine process


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request.

    Args:
        request: the request.
        number: of its first completion; the next ones have the next numbers. No other completion of
            the server has them (`first_number`).
    """

    request: Request
    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request, or one of its completions; unknown ones are ignored."""

    request_id: str
    index: int | None = None  # the completion's index; None for all


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Abort all requests of a web process that is gone, by its serial number."""

    process: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Give up requests of a model that have never run, those that came first; the `Step` that
    follows says which ones."""

    model: str
    most: int  # requests


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Keep the weights of a model for so long without a request, from now on."""

    model: str
    keep_alive_s: float


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


ModelVerb = Literal["load", "unload", "pin", "unpin"]
"""What an operator does with a model."""


@dataclass(frozen=True, slots=True)
class Manage:
    """Do something with a model; answered by a `Managed`, in the order of the questions.

    A load has only begun by then.
    """

    verb: ModelVerb
    model: str


@dataclass(frozen=True, slots=True)
class Register:
    """Register a model beside the others; answered by a `Registered`.

    It is loaded when a request for it arrives.
    """

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a model, by its served name; answered by a `Managed`.

    Its requests end with an error.
    """

    model: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Learn from outputs of a model that have ended, on this engine and others, in this order."""

    model: str
    ended: list[EndedOutput]


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask whether the engine's loop runs; answered by a `Pong`."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the engine and exit."""


ToEngine = (
    Add
    | Abort
    | AbortAll
    | Withdraw
    | KeepAlive
    | GetMemory
    | Pin
    | Unpin
    | Manage
    | Register
    | Remove
    | Learn
    | Ping
    | Close
)

# ---- from the engine process


@dataclass(frozen=True, slots=True)
class Ready:
    """All models are loaded; requests are accepted."""

    models: dict[str, ModelInfo]
    stats: EngineStats
    report: DeviceReport


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The engine could not start. The process exits after this."""

    message: str
    is_config: bool  # a `ConfigError`: the operator can fix it by changing an option
    model: str | None = None  # whose checkpoint cannot be used


@dataclass(slots=True)
class Outputs:
    """Outputs of a step, by the numbers of completions as in `Add`.

    Hundreds of completions get a token every few milliseconds. To pickle an object for each would
    take longer than a step of a small model, so outputs that are tokens and nothing else are three
    lists of integers.
    """

    numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each; empty if all have one
    token_ids: list[int] = field(default_factory=list)  # of all of them, one after the other
    others: list[tuple[int, TokenOutput]] = field(default_factory=list)  # all other outputs
    refused: dict[int, AquiferError] = field(default_factory=dict)
    """Requests that were not accepted, or were lost, by the number of one of their completions."""

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the numbers and the tokens, each, of outputs that are tokens and nothing else.

        Pre-condition: `counts` is not empty.
        """
        begin = 0
        for number, count in zip(self.numbers, self.counts, strict=True):
            yield number, self.token_ids[begin : begin + count]
            begin += count

    def by_process(self) -> dict[int, Outputs]:
        """Divide them among web processes, by serial number."""
        shares: dict[int, Outputs] = {}

        def share(number: int) -> Outputs:
            process = process_of(number)
            if process not in shares:
                shares[process] = Outputs()
            return shares[process]

        if self.counts:
            for number, token_ids in self.tokens():
                of_process = share(number)
                of_process.numbers.append(number)
                of_process.counts.append(len(token_ids))
                of_process.token_ids.extend(token_ids)
        else:
            for number, token_id in zip(self.numbers, self.token_ids, strict=True):
                of_process = share(number)
                of_process.numbers.append(number)
                of_process.token_ids.append(token_id)
        for number, output in self.others:
            share(number).others.append((number, output))
        for number, error in self.refused.items():
            share(number).refused[number] = error
        return shares


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one iteration of the engine loop."""

    outputs: Outputs
    stats: EngineStats
    launched: tuple[str, int] | None = None  # model and tokens of the step that was launched
    completed: frozenset[str] = frozenset()  # models of completions that ended as they should
    report: DeviceReport | None = None  # None if it is the one before
    # Outputs that have ended, by model, where lengths matter; the engine has not learnt from them.
    ended: Mapping[str, list[EndedOutput]] = field(default_factory=dict)
    # The answers to `Withdraw`: ids of the requests that were given up, by model.
    withdrawn: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """The answer to `GetMemory`."""

    report: MemoryReport


@dataclass(frozen=True, slots=True)
class Pinned:
    """The answer to `Pin` and `Unpin`: the number of tokens pinned, or the error."""

    answer: int | AquiferError


@dataclass(frozen=True, slots=True)
class Managed:
    """The answer to `Manage` and `Remove`: None, or the error."""

    answer: AquiferError | None


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to `Register`: the model's description, or the error."""

    answer: ModelInfo | AquiferError


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`."""


FromEngine = (
    LoadProgress | Ready | OpenFailed | Step | Memory | Pinned | Managed | Registered | Pong
)

# ---- to a web process, where there are several


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether requests are accepted, and for which models."""

    reason: UnavailableError | None  # why none are accepted; None if they are
    out_of_service: Mapping[str, str] = field(default_factory=dict)  # models, with the reasons


@dataclass(frozen=True, slots=True)
class Open:
    """Answer requests for these models, by served name."""

    models: dict[str, ModelInfo]


@dataclass(frozen=True, slots=True)
class AddModel:
    """Answer requests for one more model; answered by a `ModelsChanged`, in order."""

    spec: ModelSpec
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Answer no more requests for a model; answered likewise."""

    name: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a `Question`: what the method returned, or the error that it raised."""

    number: int
    value: Any
    error: AquiferError | None = None


@dataclass(frozen=True, slots=True)
class GetRequestMetrics:
    """Ask for `RequestMetricFamilies`; answers come in the order of the questions."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Accept no more requests, give those that run some time to finish, and exit."""

    timeout_s: float


ToWeb = Outputs | Availability | Open | AddModel | RemoveModel | Answer | GetRequestMetrics | Stop

# ---- from a web process, beside `Add` and `Abort`


@dataclass(frozen=True, slots=True)
class Question:
    """Call a method of `aquifer.serve.backend.Backend` in the server's first process."""

    number: int  # comes back with the answer
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """All is imported and the tokenizers are loaded; or not, and the process exits after this."""

    error: AquiferError | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """Requests are answered."""


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """The answer to `AddModel` and `RemoveModel`: None, or why the model's text side cannot be
    used."""

    error: AquiferError | None = None


@dataclass(frozen=True, slots=True)
class RequestMetricFamilies:
    """The answer to `GetRequestMetrics`: what this process has measured so far."""

    families: list[Any]  # prometheus_client.Metric


FromWeb = Add | Abort | Question | Prepared | Opened | ModelsChanged | RequestMetricFamilies
