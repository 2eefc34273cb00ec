"""Turns: the order in which models are asked for their next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class ModelState(NamedTuple):
    """A model's queues at the moment of the decision."""

    name: str
    num_waiting: int
    num_running: int
    last_turn: int  # number of its last turn; -1 if it had none


Turns = Callable[[Sequence[ModelState]], Sequence[int]]
"""Gives the indices of the models in the order in which they are asked; the first that has a step
runs it."""


def round_robin(models: Sequence[ModelState]) -> Sequence[int]:
    """One step for each model in turn: the model with the earliest last turn comes first."""
    return sorted(range(len(models)), key=lambda i: models[i].last_turn)
