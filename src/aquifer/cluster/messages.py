"""Messages between a server and the agent that starts engine processes for it on another node."""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.config import EngineConfig


@dataclass(frozen=True, slots=True)
class GetClock:
    """Ask for a `Clock`; the first message on every connection."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The agent's clock.

    Args:
        now_s: of time.monotonic().
        boot_id: of the machine's kernel; processes with the same one share the clock.
    """

    now_s: float
    boot_id: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start an engine process, in place of any other of this agent.

    It takes the connection over, which then carries what goes to an engine process and comes back.

    Args:
        link: id of the link that asks for it.
        config: its options; the agent knows the device.
        log_level: least level of messages that it logs.
    """

    link: str
    config: EngineConfig
    log_level: str


@dataclass(frozen=True, slots=True)
class HowEnded:
    """Ask how an engine process has ended; answered by an `Ended`, once it has.

    Args:
        link: id of the link that has asked for it.
    """

    link: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How an engine process has ended.

    Args:
        exit_code: negative for a signal; None if there was no process, or another one took its
            place.
        current_model: the model that it computed.
    """

    exit_code: int | None
    current_model: str | None


ToAgent = GetClock | StartEngine | HowEnded
