"""Weights that cannot be evicted at the moment, but soon without anything done.

They are being loaded, or copied to the host cache, or a neighbour reads them. What has no room
beside them waits.
"""

from __future__ import annotations

import time
from typing import Protocol

from aquifer.engine.pooled_weights import PooledWeights
from aquifer.engine.reports import ModelState
from aquifer.weights.reuse import ReuseStore


class Loads(Protocol):
    """A model that may be loaded in the background: a `ModelLife`."""

    @property
    def state(self) -> ModelState:
        """Its state; LOADING while it is loaded."""

    def is_filled_within(self, timeout_s: float | None) -> bool:
        """Wait for its weights for a time. Pre-condition: it loads."""


class HeldWeights:
    """The held weights of all models; a `Held` of the admitter.

    Args:
        reuse: the weights of all models.
    """

    def __init__(self, reuse: ReuseStore) -> None:
        self._reuse = reuse
        self._saving: list[PooledWeights] = []
        self._loading: Loads | None = None  # the model that began to load last

    def note_loading(self, host: Loads) -> None:
        """Note that a model begins to load."""
        self._loading = host

    def note_saving(self, weights: PooledWeights) -> None:
        """Note that weights begin to be copied to the host cache."""
        self._saving.append(weights)

    def mark(self) -> tuple[int, int]:
        """See `Held.mark`."""
        self._saving = [weights for weights in self._saving if weights.is_saving]
        return self._reuse.num_loan_changes, len(self._saving) + self._is_loading

    def was_any(self, mark: tuple[int, int]) -> bool:
        """See `Held.was_any`."""
        num_loan_changes, num_held = mark
        has_loans = self._reuse.has_loans or self._reuse.num_loan_changes != num_loan_changes
        return has_loans or num_held > 0

    def wait(self, timeout_s: float) -> None:
        """Wait until some are held no more, at most so long."""
        if self._reuse.has_loans:
            time.sleep(timeout_s)  # what neighbours read may go a moment later
        elif self._saving:
            self._saving[0].is_saved_within(timeout_s)
        elif self._loading is not None and self._is_loading:
            self._loading.is_filled_within(timeout_s)

    @property
    def _is_loading(self) -> bool:
        return self._loading is not None and self._loading.state == ModelState.LOADING
