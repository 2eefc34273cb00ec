"""The policies of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.engine.policies.admission import Admission, least_served
from aquifer.engine.policies.displacement import Displacement, place_for_each_client
from aquifer.engine.policies.express import Express, smallest_clients
from aquifer.engine.policies.relief import Relief, fewest_running
from aquifer.engine.policies.residents import Residents, longest_resident
from aquifer.engine.policies.turns import Turns, round_robin
from aquifer.engine.policies.victims import Victims, latest_of_busiest


@dataclass(frozen=True, slots=True)
class Policies:
    """One function for each decision.

    The defaults share fairly between clients, and serve the requests of one client in order of
    arrival.
    """

    turns: Turns = round_robin
    admission: Admission = least_served
    displacement: Displacement = place_for_each_client
    express: Express = smallest_clients
    victims: Victims = latest_of_busiest
    residents: Residents = longest_resident
    relief: Relief = fewest_running
