"""When to start the engine process again after it died, and with which models."""

from __future__ import annotations

from collections.abc import Sequence

from aquifer.config import ModelSpec
from aquifer.errors import UnavailableError

MAX_DEATHS = 3
"""A model that ends the engine process this often in a row is taken out of service."""
_LONGEST_PAUSE_S = 30.0


def pause_s(num_failures: int) -> float:
    """Seconds to wait before a process is started again that failed so often in a row."""
    return 0.0 if num_failures == 1 else min(_LONGEST_PAUSE_S, 0.5 * 2.0 ** (num_failures - 2))


def out_of_service(model: str, reason: str) -> UnavailableError:
    """The answer to requests for a model that is out of service."""
    return UnavailableError(
        f"model {model!r} is out of service: {reason}; restart the server to try it again"
    )


class Supervisor:
    """Counts deaths of the engine process, in all and by the model that was computed.

    A pure policy: it starts nothing itself.

    Args:
        models: the models to serve.
    """

    def __init__(self, models: Sequence[ModelSpec]) -> None:
        self._models = tuple(models)
        self._deaths = dict.fromkeys((model.name for model in models), 0)
        self._refusals: dict[str, str] = {}  # why models could not be loaded again
        self._num_failures = 0  # in a row: deaths and failed starts without a completion between
        self.num_restarts = 0

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models that are in service."""
        return tuple(model for model in self._models if model.name not in self.out_of_service)

    def add(self, model: ModelSpec) -> None:
        """Serve another model."""
        self._models = (*self._models, model)
        self._deaths[model.name] = 0

    def remove(self, name: str) -> None:
        """Serve a model no more."""
        self._models = tuple(model for model in self._models if model.name != name)
        self._deaths.pop(name, None)
        self._refusals.pop(name, None)

    @property
    def out_of_service(self) -> dict[str, str]:
        """The models that have ended the engine process too often in a row, or could not be loaded
        again, with the reason."""
        often = f"it ended the engine process {MAX_DEATHS} times in a row"
        ended = (model for model, deaths in self._deaths.items() if deaths >= MAX_DEATHS)
        return {**dict.fromkeys(ended, often), **self._refusals}

    def refused(self, model: str, reason: str) -> None:
        """Record that the process could not start again because of a model."""
        if model in self._deaths:
            self._refusals[model] = f"it could not be loaded again ({reason})"

    def failed(self, model: str | None) -> float:
        """Record that the process died, or that it could not start.

        Args:
            model: the model that was being loaded or computed, if any.

        Returns: seconds to wait before it is started again. The first restart comes at once.
        """
        if model in self._deaths:
            self._deaths[model] += 1
        self._num_failures += 1
        self.num_restarts += 1
        return pause_s(self._num_failures)

    def completed(self, model: str) -> None:
        """Record that a completion of a model has ended as it should."""
        if model in self._deaths:
            self._deaths[model] = 0
        self._num_failures = 0
