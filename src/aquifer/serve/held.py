"""What an engine process was told to keep, so that one that is started later is told so too."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container
from typing import Any

from aquifer.errors import AquiferError
from aquifer.serve.messages import Manage, ModelVerb, Pin

_logger = logging.getLogger(__name__)


class Held:
    """The prefixes and the models that an engine process was told to pin.

    Attributes:
        pins: the prefixes.
        models: the models.
    """

    def __init__(self) -> None:
        self.pins: list[Pin] = []
        self.models: set[str] = set()

    def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """A prefix is kept no more."""
        self.pins = [pin for pin in self.pins if _prefix(pin) != (model, token_ids, salt)]

    def has(self, model: str, token_ids: list[int], salt: str | None) -> bool:
        """Whether a prefix is kept."""
        return any(_prefix(pin) == (model, token_ids, salt) for pin in self.pins)

    def managed(self, verb: ModelVerb, model: str) -> None:
        """Something was done with a model."""
        if verb == "pin":
            self.models.add(model)
        elif verb == "unpin":
            self.models.discard(model)

    def take(self, other: Held) -> None:
        """Keep what another engine kept, too."""
        self.pins += other.pins
        self.models |= other.models

    def forget(self, model: str) -> None:
        """A model is removed."""
        self.pins = [pin for pin in self.pins if pin.model != model]
        self.models.discard(model)

    async def restore(
        self,
        ask: Callable[[Manage | Pin], Awaitable[Any]],
        without: Container[str],
        has_died: Callable[[], bool],
    ) -> None:
        """Have an engine process that was just started keep the same.

        What is given up meanwhile is not kept.

        Args:
            ask: sends a message and waits for the answer.
            without: models that are out of service.
            has_died: whether the process has ended, so that it cannot be asked.
        """
        for model in sorted(self.models):
            if model in self.models and model not in without and not has_died():
                try:
                    await ask(Manage("pin", model))
                    if model not in self.models and not has_died():
                        await ask(Manage("unpin", model))
                except AquiferError as error:
                    _logger.error("%r could not be pinned again: %s", model, error)
        for pin in [*self.pins]:
            if pin in self.pins and pin.model not in without and not has_died():
                try:
                    await ask(pin)
                except AquiferError as error:
                    _logger.error("a prefix of %r could not be pinned again: %s", pin.model, error)


def _prefix(pin: Pin) -> tuple[str, list[int], str | None]:
    return pin.model, pin.token_ids, pin.salt
