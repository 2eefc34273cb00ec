"""Exceptions that Aquifer raises on purpose, sorted by who must act.

AquiferError
├── ConfigError      the operator must change an option, a path or a checkpoint
│   └── UnsupportedModelError   the checkpoint is valid, but its architecture is not supported
├── RequestError     the client must change its request
│   ├── MalformedBodyError      its body is not JSON
│   ├── ContextLengthError      prompt and output do not fit the model's context
│   ├── CapacityError           the request needs more memory than the pool could ever give
│   ├── LimitError              processing it takes more time or memory than it may
│   ├── UnknownModelError       no model of that name is served
│   └── QueueFullError          not now: too many requests are waiting
├── EngineError      the engine stopped before the request finished; the server reports it
│   ├── UnavailableError        the server accepts no requests at the moment
│   └── GroupError              a device of a tensor-parallel group is lost, and so are the others
├── DriverError      the driver (operating system, CUDA) refused: "NAME: explanation"
└── InvariantError   a bug in Aquifer; never caught

"Not now" is not an exception: `PagePool.acquire` and `SequenceCache.reserve` return it as
a value, because being short of memory is an ordinary state of a server.

Code of others that a checkpoint drives may raise anything; `as_config_error` is for its callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MESSAGE_CHARACTERS = 300
"""Length to which the message of an exception of others is cut."""


class AquiferError(Exception):
    """Base of all of Aquifer's own exceptions."""


class ConfigError(AquiferError, ValueError):
    """An option, a path or a checkpoint cannot be used as given.

    Attributes:
        model: name of the model that cannot be used, where that is known.
    """

    model: str | None = None


class UnsupportedModelError(ConfigError):
    """The checkpoint is valid, but its architecture is not supported."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"cannot serve {architecture}: {reason}")
        self.architecture = architecture
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnsupportedModelError], tuple[str, str]]:
        return type(self), (self.architecture, self.reason)


class RequestError(AquiferError, ValueError):
    """A request cannot be served as it stands.

    Attributes:
        param: the field at fault, as the client spelled it, or None.
        code: a stable machine-readable reason, or None.
    """

    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None]]:
        return type(self), (self.message, self.param)


class MalformedBodyError(RequestError):
    """The body of a request is not JSON."""

    code = "invalid_json"


class ContextLengthError(RequestError):
    """Prompt and requested output exceed the model's context length."""

    code = "context_length_exceeded"


class CapacityError(RequestError):
    """The request needs more memory than the pool could ever give it."""

    code = "insufficient_memory"


class LimitError(RequestError):
    """Processing the request takes more time or memory than it may."""


class UnknownModelError(RequestError):
    """No model of this name is served."""

    code = "model_not_found"


class QueueFullError(RequestError):
    """Too many requests are waiting already; the client may retry."""

    code = "queue_full"


class EngineError(AquiferError, RuntimeError):
    """The engine stopped before the request was finished."""


class UnavailableError(EngineError):
    """The server accepts no requests at the moment; the client may retry.

    Attributes:
        retry_after_s: when, or None if that will not help.
    """

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[UnavailableError], tuple[str, int | None]]:
        return type(self), (self.message, self.retry_after_s)


class GroupError(EngineError):
    """A rank of a tensor-parallel group is lost, or a step of one failed: the group has ended."""


class DriverError(AquiferError, RuntimeError):
    """The memory driver refused a call.

    The message reads "NAME: explanation"; NAME is the driver's own error name.
    """

    def __init__(self, name: str, explanation: str) -> None:
        super().__init__(f"{name}: {explanation}")
        self.name = name
        self.explanation = explanation

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, str]]:
        return type(self), (self.name, self.explanation)


class InvariantError(AquiferError, AssertionError):
    """An internal invariant does not hold: a bug in Aquifer. Never caught."""


def one_line(error: BaseException) -> str:
    """Name and message of an exception in one line of bounded length, for another message."""
    text = " ".join(str(error).split())
    if len(text) > _MESSAGE_CHARACTERS:
        text = text[: _MESSAGE_CHARACTERS - 3] + "..."
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    name = type(error).__name__
    return f"{name}: {shown}" if shown else name


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Report any exception of others as a ConfigError, "what: name and message".

    For code that a checkpoint drives, such as the constructor of a model of Transformers: it may
    raise whatever a wrong configuration leads it to. Aquifer's own exceptions pass unchanged.

    Raises:
        ConfigError: the code within the context raised an exception.
    """
    try:
        yield
    except AquiferError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


@contextmanager
def errors_of_model(name: str) -> Iterator[None]:
    """Say in each `ConfigError` which model it is about."""
    try:
        yield
    except ConfigError as error:
        error.model = name
        raise
