"""Replicas of models that are not needed any more, by a clock of the test."""

from __future__ import annotations

from aquifer.engine.policies.replicas import Replica
from aquifer.serve.replicas import Replicas


def test_replicas_are_spare_some_time_after_they_were_needed() -> None:
    replicas, quiet = Replicas(), Replica(1, False, True)
    busy = quiet._replace(waits=True)

    def at(now_s: float, *devices: Replica | None) -> list[int]:
        return replicas.spare("m", devices, now_s)

    assert at(100.0, quiet, None, quiet) == []  # it may have been needed before
    assert at(131.0, quiet, None, quiet) == []
    assert at(161.0, quiet, None, quiet) == [2]
    assert replicas.spare("another", [quiet, quiet], 161.0) == []
    assert at(165.0, quiet, None, busy) == []
    assert at(189.0, quiet, None, quiet) == []
    assert at(219.0, quiet, None, quiet) == []
    assert at(221.0, quiet, None, quiet) == [2]
    assert at(222.0, busy, None, quiet) == []
    assert at(400.0, quiet, quiet, quiet) == [1, 2]
    replicas.forget("m")
    assert at(400.0, quiet, quiet, quiet) == []
