"""The scheduler's decisions: pure functions from a frozen snapshot, one file each.

    turns           the order in which models are asked for their next step
    admission       the waiting request that is tried next
    displacement    the running request that gives its place to another client's waiting one
    express         the clients that run in a step of their own
    victims         the running request that is preempted when the pool is short
    restore         whether its KV is copied to the host or computed again
    residents       the model that gives its memory to one that waits to be loaded
    relief          the model that gives its memory to requests of another one that wait for KV
    placement       the device that gets a request, where several could serve it
    hand_over       the waiting requests that another device gets
    replicas        the devices that have a model and are not needed for it

A policy sees tokens, counts and times, never pages or requests, and changes nothing. To replace
one, write a function of the same signature and pass it in `Policies`.
"""

from aquifer.engine.policies.admission import (
    Admission,
    AdmissionSnapshot,
    first_come,
    first_with_region,
    least_served,
)
from aquifer.engine.policies.bundle import Policies
from aquifer.engine.policies.displacement import (
    Displacement,
    DisplacementSnapshot,
    place_for_each_client,
)
from aquifer.engine.policies.express import Express, smallest_clients
from aquifer.engine.policies.placement import (
    DeviceState,
    Placement,
    PlacementSnapshot,
    affinity,
    least_loaded,
    random_device,
    round_robin_devices,
)
from aquifer.engine.policies.requests import Candidate, ClientState, RunningRequest
from aquifer.engine.policies.restore import RestoreMode, restore_by_copy
from aquifer.engine.policies.turns import ModelState, Turns, round_robin
from aquifer.engine.policies.victims import Victims, latest_arrival, latest_of_busiest, longest_left

__all__ = [
    "Admission",
    "AdmissionSnapshot",
    "Candidate",
    "ClientState",
    "DeviceState",
    "Displacement",
    "DisplacementSnapshot",
    "Express",
    "ModelState",
    "Placement",
    "PlacementSnapshot",
    "Policies",
    "RestoreMode",
    "RunningRequest",
    "Turns",
    "Victims",
    "affinity",
    "first_come",
    "first_with_region",
    "latest_arrival",
    "latest_of_busiest",
    "least_loaded",
    "least_served",
    "longest_left",
    "place_for_each_client",
    "random_device",
    "restore_by_copy",
    "round_robin",
    "round_robin_devices",
    "smallest_clients",
]
