"""The policies of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.engine.policies.admission import Admission, first_come
from aquifer.engine.policies.turns import Turns, round_robin
from aquifer.engine.policies.victims import Victims, latest_arrival


@dataclass(frozen=True, slots=True)
class Policies:
    """One function for each decision; the defaults serve in order of arrival."""

    turns: Turns = round_robin
    admission: Admission = first_come
    victims: Victims = latest_arrival
