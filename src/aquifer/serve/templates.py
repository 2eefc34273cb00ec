"""Rendering of the models' chat templates in worker processes, within limits of time and memory.

A template is a program that came with a checkpoint. One that loops forever, or computes a number of
a billion digits, must not hold up the requests of other models.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from aquifer.errors import LimitError
from aquifer.serve.sandbox import Sandbox
from aquifer.text.chat_template import RENDERER, ChatTemplate

_MODULES = (RENDERER, ChatTemplate.__module__)

_MANY = 1 << 20
"""Models whose renderings may wait for the shared worker: of each, one does at a time."""


class Templates:
    """Renders chat templates in a worker process that models share, or in one of the model's own.

    Of each model, one conversation at a time is with the shared worker. Once a template of a model
    has exceeded a limit there, the model has a worker of its own, so that it cannot do so again.

    For one event loop.

    Args:
        max_s: time that a rendering may take.
    """

    def __init__(self, max_s: float = 10.0) -> None:
        self._max_s = max_s
        self._shared = Sandbox(_MODULES, max_s, max_waiting=_MANY, niceness=0)
        self._own: dict[str, Sandbox] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def separated(self) -> frozenset[str]:
        """Models that have a worker of their own."""
        return frozenset(self._own)

    def start(self) -> None:
        """Begin to start the shared worker, so that the first conversation need not wait for it."""
        self._shared.start()

    async def render(
        self,
        model: str,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation.

        Args:
            model: served name of the model.
            template: its template.
            messages: the conversation.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            variables: further variables of the template.

        Raises:
            RequestError: the template refuses the messages.
            LimitError: it takes too long, or too much memory.
            QueueFullError: too many wait for the model's own worker.
        """
        what = f"the chat template of {model!r}"
        args = messages, add_generation_prompt, variables
        if model not in self._own:
            async with self._turns[model]:
                if model not in self._own:  # while this one waited for its turn
                    try:
                        return await self._shared.run(what, "messages", template.render, *args)
                    except LimitError:
                        self._own[model] = Sandbox(_MODULES, self._max_s)
                        raise
        return await self._own[model].run(what, "messages", template.render, *args)

    def forget(self, model: str) -> None:
        """End the worker that a model has of its own: it is served no more."""
        self._turns.pop(model, None)
        own = self._own.pop(model, None)
        if own is not None:
            own.close()

    def close(self) -> None:
        """End all workers, whatever they do."""
        for sandbox in (self._shared, *self._own.values()):
            sandbox.close()
