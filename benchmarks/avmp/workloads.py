"""The request streams of AVMP's benchmark, and their events (sections 4.1 and 4.4).

A stream depends on workload and seed alone. Time is counted in ticks, of one decode step each: a
request arrives, its prompt takes a tick for each token, and then each token that it generates.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PAGE_TOKENS = 16

FIRST_SEEDS = {"uniform_short": 1, "mixed_long": 2, "agentic_burst": 3, "sharegpt_replay": 4}
"""The first of three seeds of each workload."""

SYNTHETIC = ("uniform_short", "mixed_long", "agentic_burst")
REPLAY = "sharegpt_replay"
NUM_SEEDS = 3


class EventKind(IntEnum):
    """What happens to a request; of a tick, in this order."""

    DEPARTURE = 0
    GROWTH = 1
    ARRIVAL = 2


class Event(NamedTuple):
    """An event; they are sorted as tuples."""

    tick: int
    kind: EventKind
    request: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one workload and seed.

    Args:
        prompt: tokens of each prompt, [requests].
        generated: tokens that each generates, [requests].
        arrival: tick of each arrival, [requests].
    """

    prompt: Ints
    generated: Ints
    arrival: Ints

    @property
    def digest(self) -> str:
        """A short hash of all requests."""
        rows = zip(
            self.prompt.tolist(), self.generated.tolist(), self.arrival.tolist(), strict=True
        )
        text = "".join(f"{number},{p},{g},{a}\n" for number, (p, g, a) in enumerate(rows))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def events(self, page_tokens: int = PAGE_TOKENS) -> list[Event]:
        """All events in order.

        Args:
            page_tokens: tokens of a page; a request grows when it needs another one.
        """
        found: list[Event] = []
        lengths = zip(
            self.prompt.tolist(), self.generated.tolist(), self.arrival.tolist(), strict=True
        )
        for number, (prompt, generated, arrival) in enumerate(lengths):
            found.append(Event(arrival, EventKind.ARRIVAL, number))
            # The first token of each page after those of the prompt.
            first = -(-prompt // page_tokens) * page_tokens + 1
            found.extend(
                Event(arrival + length, EventKind.GROWTH, number)
                for length in range(first, prompt + generated + 1, page_tokens)
            )
            found.append(Event(arrival + prompt + generated, EventKind.DEPARTURE, number))
        return sorted(found)


def make_stream(workload: str, seed: int, data: Path) -> Stream:
    """The requests of a workload.

    Args:
        workload: its name.
        seed: of the random numbers.
        data: folder with the prompt lengths of ShareGPT, which the replay needs.
    """
    random = np.random.default_rng(seed)
    makers: dict[str, Callable[[], tuple[Ints, Ints, Ints]]] = {
        "uniform_short": lambda: _uniform_short(random),
        "mixed_long": lambda: _mixed_long(random),
        "agentic_burst": lambda: _agentic_burst(random),
        "sharegpt_replay": lambda: _sharegpt_replay(random, data),
    }
    return Stream(*makers[workload]())


def _uniform_short(random: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    num = 512
    prompt = random.integers(128, 1025, num)
    return prompt, random.integers(64, 257, num), np.arange(num)


def _mixed_long(random: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    num = 256
    is_long = random.random(num) < 0.2
    short = random.integers(512, 4097, num)
    prompt = np.where(is_long, random.integers(16384, 65537, num), short)
    return prompt, random.integers(128, 513, num), np.arange(num)


def _agentic_burst(random: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    num = 256
    arrival = np.ceil(random.exponential(0.1, num).cumsum()).astype(np.int64)
    prompt = random.lognormal(8.5, 1.0, num).astype(np.int64).clip(64, 65536)
    return prompt, random.integers(64, 257, num), arrival


def _sharegpt_replay(random: np.random.Generator, data: Path) -> tuple[Ints, Ints, Ints]:
    num = 512
    with gzip.open(data / "sharegpt_prompt_tokens.json.gz", "rt") as file:
        counts = np.array(json.load(file)["prompt_tokens"])
    prompt = random.choice(counts, num).clip(16, 4096).astype(np.int64)
    generated = random.lognormal(4.5, 1.0, num).astype(np.int64).clip(32, 2048)
    return prompt, generated, np.arange(num)
