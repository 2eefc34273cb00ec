"""Which workers a cluster should have, what its controller writes down, and its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquifer.cluster.policy import Changes, Node, Placement, bundle, capacity, decide
from aquifer.cluster.ray_token import ray_environment, token_of_node
from aquifer.cluster.state import ClusterState, Settings, WorkerRecord, WorkerView, view_of
from aquifer.cluster.tcp import Address
from aquifer.cluster.token import write_token
from aquifer.config import ModelSpec
from aquifer.errors import ConfigError

NODES = [Node("a", 2), Node("b", 2), Node("c", 1)]


def test_workers_are_spread() -> None:
    assert decide(NODES, [], 4) == Changes(["a", "b", "c", "a"], [], [])
    running = [Placement("1", "a"), Placement("2", "a")]
    assert decide(NODES, running, 4) == Changes(["b", "c"], [], [])
    assert decide(NODES, running, 2) == Changes([], [], [])


def test_as_many_as_there_is_room_for() -> None:
    assert decide(NODES, [], 0).create == ["a", "b", "c", "a", "b"]
    assert decide(NODES, [], 9).create == ["a", "b", "c", "a", "b"]
    assert decide([], [], 0) == Changes([], [], [])


def test_too_many_end_the_newest_first() -> None:
    running = [Placement(name, "a") for name in "123"]
    assert decide(NODES, running, 1) == Changes([], ["2", "3"], [])


def test_what_was_on_a_node_that_is_gone_is_replaced() -> None:
    running = [Placement("1", "a"), Placement("2", "gone"), Placement("3", "gone")]
    assert decide(NODES, running, 3) == Changes(["b", "c"], [], ["2", "3"])


def test_nodes_that_leave_or_fail_get_none() -> None:
    nodes = [Node("a", 2, takes_more=False), Node("b", 1), Node("c", 1, num_lost=1), Node("d", 1)]
    assert decide(nodes, [], 3).create == ["b", "d", "c"]
    assert decide(nodes, [Placement("1", "a")], 4).create == ["b", "d", "c"]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 2)), max_size=6),
    st.lists(st.integers(0, 7), max_size=9),
    st.integers(0, 12),
)
def test_following_it_leads_to_a_state_that_stays(
    kinds: list[tuple[int, bool, int]], places: list[int], num_wanted: int
) -> None:
    nodes = [Node(str(index), *kind) for index, kind in enumerate(kinds)]
    workers = [Placement(f"w{index}", str(place)) for index, place in enumerate(places)]
    changes = decide(nodes, workers, num_wanted)
    assert not (changes.create and changes.end)
    gone = {*changes.end, *changes.lost}
    left = [worker for worker in workers if worker.name not in gone]
    left += [Placement(f"n{index}", node) for index, node in enumerate(changes.create)]
    assert decide(nodes, left, num_wanted) == Changes([], [], [])
    assert not num_wanted or len(left) <= max(num_wanted, 0)
    for node in nodes:
        before = sum(worker.node_id == node.node_id for worker in workers)
        after = sum(worker.node_id == node.node_id for worker in left)
        assert after <= max(before, node.capacity)
        assert node.takes_more or after <= before


def test_room_of_nodes() -> None:
    def room(num_wanted: int = 0, *, on_gpu: bool = True, **resources: float) -> int:
        return capacity(resources, on_gpu=on_gpu, num_devices=2, num_wanted=num_wanted)

    assert room(GPU=8.0, CPU=64.0) == 4
    assert room(GPU=3.0) == 1
    assert room(CPU=64.0) == 0
    assert room(on_gpu=False, CPU=64.0) == 1
    assert room(5, on_gpu=False, CPU=64.0) == 64
    assert room(on_gpu=False, GPU=8.0) == 0
    assert bundle(on_gpu=True, num_devices=2) == {"CPU": 1, "GPU": 2}
    assert bundle(on_gpu=False, num_devices=1) == {"CPU": 1}


def test_what_is_written_down_is_read_again() -> None:
    assert ClusterState.from_json(ClusterState().to_json()) == ClusterState()
    models = [ModelSpec("m", Path("/m"), ("n", "o")), ModelSpec("h", Path("/h"), hub_id="org/h")]
    address = Address("10.0.0.1", 1234)
    state = ClusterState(
        Settings(True, 2, 3, "debug", 7.5),
        {model.name: model for model in models},
        {"w1": WorkerRecord("w1", "a", address, True), "w2": WorkerRecord("w2", "b")},
        2,
        "http://10.0.0.1:8000",
    )
    again = ClusterState.from_json(state.to_json())
    assert again == state
    assert view_of(again, 7) == (7, (WorkerView("w1", address, True),))


def test_ray_has_the_token_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_token(file)
    variables = ray_environment(file)
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
    assert token_of_node(variables) == file.read_text().strip()
    assert token_of_node({"RAY_AUTH_TOKEN": "another"}) == "another"
    with pytest.raises(ConfigError, match="without a token"):
        token_of_node({})
