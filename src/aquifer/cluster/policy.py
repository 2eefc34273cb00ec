"""Which workers a cluster should have, and where: pure functions, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A node of the cluster that is alive.

    Args:
        node_id: its id.
        capacity: the most workers that it has room for.
        takes_more: whether it may get a worker now; not while it leaves, or after a worker could
            not be started there a moment ago.
        num_lost: workers that have ended there without being told to.
    """

    node_id: str
    capacity: int
    takes_more: bool = True
    num_lost: int = 0


class Placement(NamedTuple):
    """A worker that runs or starts, by its name, and its node."""

    name: str
    node_id: str


class Changes(NamedTuple):
    """What brings the cluster to what it should be.

    Args:
        create: nodes that get a worker, an entry for each worker.
        end: workers that end, by name.
        lost: workers whose node is gone, by name.
    """

    create: list[str]
    end: list[str]
    lost: list[str]


def decide(nodes: Sequence[Node], workers: Sequence[Placement], num_wanted: int) -> Changes:
    """What to change.

    New workers go where the fewest are, and of such nodes where the fewest were lost. Of too many,
    the newest end.

    Args:
        nodes: all that are alive.
        workers: all that run or start, oldest first.
        num_wanted: how many there should be; 0 for as many as there is room for.
    """
    alive = {node.node_id for node in nodes}
    lost = [worker.name for worker in workers if worker.node_id not in alive]
    left = [worker for worker in workers if worker.node_id in alive]
    if num_wanted and len(left) > num_wanted:
        return Changes([], [worker.name for worker in left[num_wanted:]], lost)
    counts = Counter(worker.node_id for worker in left)
    create: list[str] = []
    while not num_wanted or len(left) + len(create) < num_wanted:
        free = [node for node in nodes if node.takes_more and counts[node.node_id] < node.capacity]
        if not free:
            break
        chosen = min(free, key=lambda node: (counts[node.node_id], node.num_lost))
        counts[chosen.node_id] += 1
        create.append(chosen.node_id)
    return Changes(create, [], lost)


def capacity(
    resources: Mapping[str, float], *, on_gpu: bool, num_devices: int, num_wanted: int
) -> int:
    """The most workers that a node has room for.

    Args:
        resources: of the node, as Ray counts them.
        on_gpu: whether workers run on GPUs.
        num_devices: devices of each worker.
        num_wanted: workers of the cluster; 0 for as many as there is room for, which on the CPU is
            one for each node.
    """
    if on_gpu:
        return int(resources.get("GPU", 0)) // num_devices
    num_cpus = int(resources.get("CPU", 0))
    return num_cpus if num_wanted else min(num_cpus, 1)


def bundle(*, on_gpu: bool, num_devices: int) -> dict[str, float]:
    """The resources of a worker, of which Ray makes sure that its node has them."""
    return {"CPU": 1, "GPU": num_devices} if on_gpu else {"CPU": 1}
