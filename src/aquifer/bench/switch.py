"""Time to the first token of a request for a model, by where its weights are.

They are on the device, half of them there, in host memory, or in files that nothing has in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aquifer.bench.result import summarize
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import InvariantError
from aquifer.llm import LLM
from aquifer.memory.host_buffer import HostBuffer
from aquifer.weights.loader import copy_bytes

_SAMPLE_BYTES = 1 << 30
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Place:
    """Requests with the weights at one place."""

    name: str
    moved_bytes: int  # of weights, for each request
    first_token_s: list[float]

    def figures(self, resident_s: float, copy_bytes_per_s: float) -> dict[str, Any]:
        """All figures.

        Args:
            resident_s: time to first token with all weights on the device.
            copy_bytes_per_s: speed of a copy from page-locked memory.
        """
        summary = summarize(self.first_token_s)
        moved_s = summary["median"] - resident_s
        floor_s = resident_s + self.moved_bytes / copy_bytes_per_s
        return {
            **asdict(self),
            "summary": summary,
            "floor_s": floor_s,
            "moved_bytes_per_s": self.moved_bytes / moved_s if self.moved_bytes else None,
        }


def measure_switch(
    open_llm: Callable[[int], LLM], folder: Path, input_len: int, repeats: int, seed: int
) -> list[Place]:
    """Time requests of one token with the weights at each place.

    Args:
        open_llm: opens a model, given the size of the host cache in bytes.
        folder: its checkpoint.
        input_len: tokens of the prompts.
        repeats: requests for each place.
        seed: of the prompts.
    """
    random = np.random.default_rng(seed)
    places: list[Place] = []
    with open_llm(0) as llm:
        switch = _Switch(llm, input_len, random)
        num_bytes = switch.weight_bytes
        switch.first_token_s()  # the first pass of a process
        places.append(switch.measure("resident", 0, repeats))
        places.append(switch.measure("files", num_bytes, repeats, lambda: forget_files(folder)))
    with open_llm(num_bytes) as llm:
        switch = _Switch(llm, input_len, random)
        switch.wait_until_saved()
        switch.first_token_s()
        places.append(switch.measure("half resident", num_bytes // 2, repeats))
        places.append(switch.measure("host", num_bytes, repeats))
    return places


class _Switch:
    """A model of which the weights are moved."""

    def __init__(self, llm: LLM, input_len: int, random: np.random.Generator) -> None:
        self._engine = llm.engine
        ((self._name, info),) = self._engine.models.items()
        self.weight_bytes = info.weight_bytes
        self._vocab_size = info.vocab_size
        self._input_len = input_len
        self._random = random
        self._numbers = count()

    def measure(
        self, place: str, moved_bytes: int, repeats: int, prepare: Callable[[], None] = lambda: None
    ) -> Place:
        """Time requests, before each of which so many bytes are evicted."""
        seconds = []
        moved: set[int] = set()
        for _ in range(repeats):
            if moved_bytes:
                self._engine.unload_model(self._name, self.weight_bytes - moved_bytes)
            prepare()
            moved.add(self.weight_bytes - self._engine.statuses[self._name].resident_bytes)
            seconds.append(self.first_token_s())
        (moved_bytes,) = moved
        return Place(place, moved_bytes, seconds)

    def first_token_s(self) -> float:
        """Time from a request of random tokens to its token."""
        engine = self._engine
        tokens = self._random.integers(self._vocab_size, size=self._input_len).tolist()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        engine.add(Request(str(next(self._numbers)), self._name, tokens, params, time.monotonic()))
        outputs: list[TokenOutput] = []
        while not outputs:
            outputs = engine.step()
        seconds = time.perf_counter() - start
        if outputs[0].error is not None:
            raise InvariantError(f"a request failed: {outputs[0].error}")
        while engine.has_work:
            engine.step()
        return seconds

    def wait_until_saved(self) -> None:
        """Until host memory has all weights."""
        while self._engine.statuses[self._name].is_saving:
            time.sleep(_PAUSE_S)
        if self._engine.statuses[self._name].host_bytes < self.weight_bytes:
            raise InvariantError("the weights were not copied to host memory")


def forget_files(folder: Path) -> None:
    """Have the system drop its copies in memory of a folder's files; they must be written out."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def copy_rate(device: torch.device) -> float:
    """Bytes per second from page-locked memory to a device, the best of three copies."""
    buffer = HostBuffer(_SAMPLE_BYTES, device)
    target = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        copy_bytes([(buffer.bytes, target)])
        seconds.append(time.perf_counter() - start)
    buffer.close()
    return _SAMPLE_BYTES / min(seconds)
