"""Time to the first token of a request for a model, by where its weights are.

They are on the device, half of them there, in host memory, in files that nothing has in memory, or
on the device of another process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table

from aquifer.bench.report import new_table, title
from aquifer.bench.result import summarize
from aquifer.config import EngineConfig
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import InvariantError
from aquifer.llm import LLM
from aquifer.memory.host_buffer import in_pieces, locked_buffer
from aquifer.weights.loader import copy_bytes

NEIGHBOUR = "neighbour"
"""How names of places begin that are the device of another process."""

_SAMPLE_BYTES = 1 << 30
_PAUSE_S = 0.01
_AHEAD_S = 30.0  # how long to wait at most until all pages are mapped ahead


@dataclass(frozen=True, slots=True)
class Place:
    """Requests with the weights at one place."""

    name: str
    moved_bytes: int  # of weights, for each request
    mapped_bytes: list[int]  # of a neighbour's pages that were mapped when the request came
    first_token_s: list[float]

    @property
    def is_at_neighbour(self) -> bool:
        """Whether they were on the device of another process."""
        return self.name.startswith(NEIGHBOUR)

    def figures(self, resident_s: float, copy_bytes_per_s: float) -> dict[str, Any]:
        """All figures. The speed is None if nothing is moved, or took no longer than resident ones.

        Args:
            resident_s: time to first token with all weights on the device.
            copy_bytes_per_s: speed of a copy from the place, or from page-locked memory for files.
        """
        summary = summarize(self.first_token_s)
        moved_s = summary["median"] - resident_s
        floor_s = resident_s + self.moved_bytes / copy_bytes_per_s
        return {
            **asdict(self),
            "summary": summary,
            "floor_s": floor_s,
            "moved_bytes_per_s": (
                self.moved_bytes / moved_s if self.moved_bytes and moved_s > 0 else None
            ),
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
        switch = _Switch(llm.engine, input_len, random)
        num_bytes = switch.weight_bytes
        switch.first_token_s()  # the first pass of a process
        places.append(switch.measure("resident", 0, repeats))
        places.append(switch.measure("files", num_bytes, repeats, lambda: forget_files(folder)))
    with open_llm(num_bytes) as llm:
        switch = _Switch(llm.engine, input_len, random)
        switch.wait_until_saved()
        switch.first_token_s()
        places.append(switch.measure("half resident", num_bytes // 2, repeats))
        places.append(switch.measure("host", num_bytes, repeats))
    return places


def figures_of(places: list[Place], device: torch.device, neighbour: str | None) -> dict[str, Any]:
    """The figures of all places beside the rates of plain copies, which are measured now.

    Args:
        places: the first one is `resident`.
        device: the one that the weights are moved to.
        neighbour: that of the other process; None for none.
    """
    resident_s = summarize(places[0].first_token_s)["median"]
    rate = copy_rate(device)
    peer = None if neighbour is None else peer_rate(torch.device(neighbour), device)
    return {
        "copy_bytes_per_s": rate,
        "neighbour": neighbour,
        "peer_bytes_per_s": peer,
        "places": [
            place.figures(resident_s, peer if peer and place.is_at_neighbour else rate)
            for place in places
        ],
    }


def switch_table(figures: dict[str, Any]) -> Table:
    """A table of the figures of all places."""
    table = new_table(f"{title(figures)}: time to the first token")
    for column in ("weights in", "median, s", "p99", "floor", "GB moved", "mapped", "GB/s"):
        table.add_column(column, justify="left" if column == "weights in" else "right")
    for place in figures["places"]:
        moved = place["moved_bytes_per_s"]
        table.add_row(
            place["name"],
            *(f"{place['summary'][key]:.3f}" for key in ("median", "p99")),
            f"{place['floor_s']:.3f}",
            f"{place['moved_bytes'] / 1e9:.2f}",
            _mapped_gb(place["mapped_bytes"]),
            "" if moved is None else f"{moved / 1e9:.1f}",
        )
    table.caption = (
        f"floor: the resident one, and a copy at {figures['copy_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    if figures["neighbour"] is not None:
        table.caption += (
            f", or {figures['peer_bytes_per_s'] / 1e9:.0f} GB/s from the neighbour; mapped: GB of "
            "its pages that were mapped when the request came"
        )
    return table


def _mapped_gb(mapped_bytes: list[int]) -> str:
    """GB that were mapped, over the requests for a place; nothing if none were."""
    least, most = (f"{edge(mapped_bytes) / 1e9:.2f}" for edge in (min, max))
    if not any(mapped_bytes):
        return ""
    return least if least == most else f"{least} to {most}"


def measure_neighbour(
    config: EngineConfig, device: str, input_len: int, repeats: int, seed: int
) -> list[Place]:
    """Time requests of one token with the weights in the pool of another process.

    Its pages are mapped here for the first request after they were loaded there, and stay so. Where
    they are mapped ahead, some may be mapped before even if the request comes at once; and there
    are requests that come when all are.

    Args:
        config: how both processes open the model; neither retains prefixes.
        device: of the other process; it may be the same one.
        input_len: tokens of the prompts.
        repeats: requests of each kind.
        seed: of the prompts.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TemporaryDirectory(prefix="aquifer-") as folder, ours:
        config = replace(config, neighbours=Path(folder), enable_prefix_caching=False)
        lent = replace(config, device=device)
        process = context.Process(target=_lend, args=(lent, theirs), daemon=True)
        process.start()
        theirs.close()

        def load_again() -> None:
            ours.send(None)
            ours.recv()

        def load_and_wait() -> None:
            load_again()
            end_s = time.monotonic() + _AHEAD_S
            while engine.memory().neighbour_bytes < num_bytes and time.monotonic() < end_s:
                time.sleep(_PAUSE_S)

        ours.recv()
        try:
            with closing(Engine.open(config)) as engine:
                switch = _Switch(engine, input_len, np.random.default_rng(seed))
                num_bytes = switch.weight_bytes
                switch.first_token_s()
                places = [
                    switch.measure(f"{NEIGHBOUR}, newly mapped", num_bytes, repeats, load_again),
                    switch.measure(NEIGHBOUR, num_bytes, repeats),
                ]
                if engine.pool.driver.max_mappings is None:
                    name = f"{NEIGHBOUR}, mapped ahead"
                    places.append(switch.measure(name, num_bytes, repeats, load_and_wait))
                sources = switch.loaded_from
        finally:
            ours.close()
            process.join()
    if sources != {"neighbour"}:
        raise InvariantError("the weights did not come from the other process")
    return places


def _lend(config: EngineConfig, connection: Connection) -> None:
    """Have a model in the pool for another process, and load it again whenever that asks for it."""
    with closing(Engine.open(config)) as engine, suppress(EOFError):
        (name,) = engine.models
        connection.send(None)
        while True:
            connection.recv()
            engine.unload_model(name)
            engine.ask_for_model(name)
            while engine.has_work:
                engine.step()
            connection.send(None)


class _Switch:
    """A model of which the weights are moved."""

    def __init__(self, engine: Engine, input_len: int, random: np.random.Generator) -> None:
        self._engine = engine
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
        seconds, mapped = list[float](), list[int]()
        moved: set[int] = set()
        for _ in range(repeats):
            if moved_bytes:
                self._engine.unload_model(self._name, self.weight_bytes - moved_bytes)
            prepare()
            moved.add(self.weight_bytes - self._engine.statuses[self._name].resident_bytes)
            mapped.append(self._engine.memory().neighbour_bytes)
            seconds.append(self.first_token_s())
        (moved_bytes,) = moved
        return Place(place, moved_bytes, mapped, seconds)

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

    @property
    def loaded_from(self) -> set[str]:
        """The sources of all loads so far."""
        return {source for _, source in self._engine.memory().loaded_bytes}

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


def peer_rate(source: torch.device, target: torch.device) -> float:
    """Bytes per second from one device to another, or within one, the best of three copies."""
    tensors = [
        torch.zeros(_SAMPLE_BYTES, dtype=torch.uint8, device=device) for device in (source, target)
    ]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        tensors[1].copy_(tensors[0])
        if target.type != "cpu":
            torch.cuda.synchronize(target)
        seconds.append(time.perf_counter() - start)
    return _SAMPLE_BYTES / min(seconds)


def copy_rate(device: torch.device) -> float:
    """Bytes per second from page-locked memory to a device, the best of three copies."""
    buffer = locked_buffer(_SAMPLE_BYTES, device)
    target = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        copy_bytes(list(in_pieces(buffer.bytes, target)))
        seconds.append(time.perf_counter() - start)
    buffer.close()
    return _SAMPLE_BYTES / min(seconds)
