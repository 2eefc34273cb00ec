"""A rank that dies, or a step that fails on one: the group ends with an error, and no process of it
is left."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.checkpoints import tiny_llama
from tests.serve.running import eventually, is_running

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.leader import start_ranks
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import ConfigError, GroupError
from aquifer.memory.driver import rank_devices
from aquifer.parallel.collectives import GroupCollectives
from aquifer.parallel.ranks import Ranks


def engine_config(folder: Path) -> EngineConfig:
    return EngineConfig(
        (ModelSpec("m", folder),), device="cpu", tensor_parallel_size=2, memory_bytes=32 << 20
    )


def request(max_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(f"for {max_tokens}", "m", [5, 6, 7], params, 0.0)


def run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_rank_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    """While it runs steps; each later call fails with the same reason, and closing it works."""
    config = engine_config(tiny_llama(tmp_path / "m"))
    ranks = start_ranks("cpu", 2)
    engine = Engine.open(config, ranks=ranks)
    engine.add(request(1000))
    for _ in range(5):
        engine.step()
    (victim,) = ranks.process_ids
    os.kill(victim, signal.SIGKILL)
    died = rf"rank 1 of 2 \(cpu, process {victim}\) died with exit code -9"
    with pytest.raises(GroupError, match=died):
        run_out(engine)
    assert engine.has_work
    with pytest.raises(GroupError, match=died):
        engine.step()
    engine.close()
    ranks.close()
    assert not is_running(victim)


def test_a_rank_that_dies_while_nothing_runs_is_noticed(tmp_path: Path) -> None:
    config = engine_config(tiny_llama(tmp_path / "m"))
    ranks = start_ranks("cpu", 2)
    engine = Engine.open(config, ranks=ranks)
    assert not engine.has_work
    assert engine.idle_s is not None  # the process looks after it
    os.kill(ranks.process_ids[0], signal.SIGKILL)
    eventually(lambda: engine.has_work, "the rank is missed")
    with pytest.raises(GroupError, match="died with exit code -9"):
        engine.step()
    engine.close()
    ranks.close()


def test_a_rank_that_dies_before_it_is_connected() -> None:
    """Rank 0 waits for it no longer than until it has died."""
    ranks = Ranks(["cpu", "meta"], answer_in_another_order)  # no collectives are for that device
    with pytest.raises(GroupError, match=r"rank 1 of 2 \(meta, .* died with exit code 1"):
        ranks.start()
    assert not any(map(is_running, ranks.process_ids))


def test_a_step_that_fails_on_rank_0_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it within the step."""
    ranks = start_ranks("cpu", 2)
    engine = Engine.open(engine_config(tiny_llama(tmp_path / "m")), ranks=ranks)
    engine.add(request(9))
    engine.step()

    def fail(*partials: object) -> None:
        raise RuntimeError("no memory for a sum")

    monkeypatch.setattr(ranks.collectives, "total", fail)
    with pytest.raises(GroupError, match=r"failed on rank 0 of 2 \(cpu\).*: no memory"):
        run_out(engine)
    engine.close()
    processes = ranks.process_ids
    ranks.close()
    assert not any(map(is_running, processes))


def test_an_engine_ends_the_ranks_that_it_has_started(tmp_path: Path) -> None:
    engine = Engine.open(engine_config(tiny_llama(tmp_path / "m")))
    engine.add(request(3))
    tokens = [token for _ in range(9) for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 3
    engine.close()
    with pytest.raises(ConfigError, match="does not exist"):
        Engine.open(engine_config(tmp_path / "none"))


def test_devices_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert rank_devices("cuda", 2) == ("cuda:0", "cuda:1")
    assert rank_devices("cuda:1", 3) == ("cuda:1", "cuda:2", "cuda:3")
    assert rank_devices("cpu", 2) == ("cpu", "cpu")
    with pytest.raises(ConfigError, match=r"3 devices from cuda:2 on .* has 4; give"):
        rank_devices("cuda:2", 3)


def answer_in_another_order(
    connection: Connection, collectives: GroupCollectives, device: str
) -> None:
    """A rank that answers the second question first."""
    connection.recv()
    connection.send("second")
    connection.recv()
    connection.send("first")
    with suppress(EOFError):
        connection.recv()


def test_answers_are_those_of_their_questions() -> None:
    """Two threads ask, of which one waits for weights and the other one registers a model."""
    ranks = Ranks(rank_devices("cpu", 3), answer_in_another_order)
    ranks.start()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(ranks.receive, lambda answer: answer == "first")
        ranks.send("question")
        assert ranks.receive(lambda answer: answer == "second") == ["second"] * 2
        assert not first.done()
        ranks.send("question")
        assert first.result() == ["first"] * 2
    ranks.close()
