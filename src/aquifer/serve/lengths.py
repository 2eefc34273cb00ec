"""Lengths of outputs that have ended, shared by the engines of a server.

Every engine learns from the outputs of all, in one order, and one that is started later learns
from the latest of them. So buckets have the same bounds on all devices (ODMA, section 3.5), and
forecasts do not depend on which device has served requests like this one. An engine that is started
later counts from the first one that it gets, so its bounds change up to a hundred outputs earlier
or later than those of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from aquifer.predict.ended import EndedOutput
from aquifer.serve.messages import Learn

_LATEST = 1000
"""Outputs of a model that an engine learns from when it starts: as many as windows of lengths
hold."""


class Learner(Protocol):
    """An engine, which learns what it is sent; `EngineKeeper` is one."""

    def send(self, message: Learn) -> None:
        """Send a message; it is lost if the engine process is gone."""


class SharedLengths:
    """The latest outputs that have ended on any engine, and the engines that learn from them."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[EndedOutput]] = {}  # by model
        self._learners: set[Learner] = set()

    def join(self, learner: Learner) -> None:
        """Have an engine learn from the latest outputs, and from all that end later.

        Nothing happens if it does so already.
        """
        if learner not in self._learners:
            self._learners.add(learner)
            for model, ended in self._latest.items():
                learner.send(Learn(model, list(ended)))

    def leave(self, learner: Learner) -> None:
        """Send nothing more to an engine: its process is gone."""
        self._learners.discard(learner)

    def add(self, outputs: Mapping[str, Sequence[EndedOutput]]) -> None:
        """Have all engines learn from outputs that have ended on one of them.

        Args:
            outputs: by model.
        """
        for model, ended in outputs.items():
            self._latest.setdefault(model, deque(maxlen=_LATEST)).extend(ended)
            for learner in self._learners:
                learner.send(Learn(model, list(ended)))

    def forget(self, model: str) -> None:
        """Forget the outputs of a model that is removed."""
        self._latest.pop(model, None)
