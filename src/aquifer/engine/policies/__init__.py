"""The scheduler's decisions: pure functions from a frozen snapshot, one file each.

    turns       the order in which models are asked for their next step
    admission   the waiting request that is tried next
    victims     the running request that is preempted when the pool is short
    restore     whether its KV is copied to the host or computed again

A policy sees tokens, counts and times, never pages or requests, and changes nothing. To replace
one, write a function of the same signature and pass it in `Policies`.
"""

from aquifer.engine.policies.admission import Admission, AdmissionSnapshot, Candidate, first_come
from aquifer.engine.policies.bundle import Policies
from aquifer.engine.policies.restore import RestoreMode, restore_by_copy
from aquifer.engine.policies.turns import ModelState, Turns, round_robin
from aquifer.engine.policies.victims import RunningRequest, Victims, latest_arrival

__all__ = [
    "Admission",
    "AdmissionSnapshot",
    "Candidate",
    "ModelState",
    "Policies",
    "RestoreMode",
    "RunningRequest",
    "Turns",
    "Victims",
    "first_come",
    "latest_arrival",
    "restore_by_copy",
    "round_robin",
]
