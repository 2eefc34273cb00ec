"""Fences of a GPU: recorded events."""

from __future__ import annotations

import torch


class EventFence:
    """The `Fence` of a recorded CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def passed(self) -> bool:
        """See `Fence.passed`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `Fence.wait`."""
        self._event.synchronize()
