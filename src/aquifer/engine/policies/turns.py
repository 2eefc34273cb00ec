"""Turns: in which order models are asked for their next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class ModelState(NamedTuple):
    """A model's queues at the moment of the decision."""

    name: str
    num_waiting: int
    num_running: int
    last_turn: int  # number of the turn in which it was asked last; -1 for never


Turns = Callable[[Sequence[ModelState]], Sequence[int]]
"""Gives the indices of the models in the order in which they are asked; the first that has a step
runs it."""


def round_robin(models: Sequence[ModelState]) -> Sequence[int]:
    """A step each in turn: the model that was asked longest ago comes first."""
    return sorted(range(len(models)), key=lambda i: models[i].last_turn)
