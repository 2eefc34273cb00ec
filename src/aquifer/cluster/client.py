"""Calls of the controller, made again while it is started again."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from aquifer.cluster.controller import LAST_S, controller_actor, reason_of
from aquifer.errors import UnavailableError

_PAUSE_S = 0.2
_RETRY_S = 5
_ANSWER_S = 30.0


class ControllerClient:
    """Calls the controller of the cluster that this process is connected to.

    Pre-condition: `ray.init`.
    """

    async def call(self, method: str, *args: Any, patience_s: float = 10.0) -> Any:
        """Call a method of `Controller`.

        Args:
            method: its name.
            args: its arguments.
            patience_s: how long to try again if the controller cannot be reached.

        Raises:
            UnavailableError: it could not be reached.
        """
        until_s = time.monotonic() + patience_s
        while True:
            try:
                actor = await asyncio.to_thread(controller_actor)
                async with asyncio.timeout(patience_s + _ANSWER_S):
                    return await getattr(actor, method).remote(*args)
            except (RayError, TimeoutError) as error:
                if time.monotonic() >= until_s:
                    raise UnavailableError(
                        f"the cluster's controller does not answer: {reason_of(error)}", _RETRY_S
                    ) from error
                await asyncio.sleep(_PAUSE_S)

    def call_now(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """The same from code without an event loop.

        Raises:
            UnavailableError: the controller could not be reached.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = getattr(controller_actor(), method).remote(*args)
                return ray.get(answer, timeout=max(until_s - time.monotonic(), 0.1))
            except RayError as error:
                if time.monotonic() >= until_s:
                    raise UnavailableError(
                        f"the cluster's controller does not answer: {reason_of(error)}", _RETRY_S
                    ) from error
                time.sleep(_PAUSE_S)

    def leave(self, node_id: str) -> None:
        """Have a node get no more workers, and return once it has none.

        Raises:
            UnavailableError: the controller could not be reached.
        """
        settings = self.call_now("status")["settings"]
        drain_s = settings["drain_s"] if settings else 0.0
        self.call_now("leave", node_id, timeout_s=drain_s + LAST_S + _ANSWER_S)

    def end(self, front: str, timeout_s: float = 10.0) -> None:
        """End the workers and the controller, unless another server uses them.

        Args:
            front: id of the server that stops.
            timeout_s: how long to wait until the workers have ended. The controller ends in any
                case; workers that are left then are ended by the controller of the next server.
        """
        with suppress(UnavailableError):
            if not self.call_now("stop", front, timeout_s=timeout_s):
                return
        with suppress(RayError):  # it is gone, and so is the cluster
            ray.kill(controller_actor(), no_restart=True)
