"""What policies see of requests and clients."""

from __future__ import annotations

from typing import NamedTuple


class Candidate(NamedTuple):
    """A waiting request."""

    arrival: int  # number in the order of arrival, over all models
    num_prompt_tokens: int
    num_tokens: int  # known tokens of its longest sequence, prompt included
    num_sequences: int  # slots that it needs, all at once
    num_preemptions: int
    client: int = 0  # number of the client that it is for


class ClientState(NamedTuple):
    """What a client was given so far, over all models."""

    served_tokens: float = 0.0  # see `aquifer.engine.clients`
    num_running: int = 0  # sequences


class RunningRequest(NamedTuple):
    """A running request."""

    model: str
    arrival: int  # number in the order of arrival, over all models
    num_tokens: int  # known tokens of all its sequences
    num_sequences: int
    num_preemptions: int
    client: int = 0  # number of the client that it is for
    # Tokens that all its sequences are expected to get yet; None where lengths are not forecast.
    expected_left: float | None = None
