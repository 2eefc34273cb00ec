"""Engines with random weights, and requests for them."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.vattention.settings import SEED, Settings

from aquifer.bench.latency import StepTimes
from aquifer.bench.workload import LengthRange, Workload
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import EngineError
from aquifer.garbage import old_objects_left_out
from aquifer.llm import LLM
from aquifer.memory.driver.base import Driver, Handle
from aquifer.options import options_of

KV_CACHES = ("virtual", "paged")

_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_MAX_SEQS = 64
_WARM_UP_TOKENS = (16, 4)  # of a prompt and of an output
_numbers = count()


@contextmanager
def open_llm(settings: Settings, kv_cache: str, **options: Any) -> Iterator[LLM]:
    """Open an engine with the model of the settings; it closes at the end."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "llama-3-8b"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(settings.config)))
        options = {
            "memory": settings.memory,
            "page_size": settings.page_bytes,
            "max_num_seqs": _MAX_SEQS,
            **options,
        }
        with LLM(
            folder,
            device=settings.device,
            load_format="dummy",
            kv_cache=kv_cache,
            seed=SEED,
            **options,
        ) as llm:
            yield llm


def ways_of_mapping() -> dict[str, dict[str, Any]]:
    """Options of `LLM` for each way in which a decode step gets its pages.

    A version of Aquifer without the option `map_ahead` has one way.
    """
    if any(option.name == "map_ahead" for option in options_of("llm")):
        return {name: {"map_ahead": name} for name in ("background", "step", "off")}
    return {"default": {}}


def describe(llm: LLM) -> dict[str, Any]:
    """What the file of a result says about an engine."""
    (info,) = llm.engine.models.values()
    return {
        "num_parameters": info.num_parameters,
        "dtype": info.dtype,
        "page_bytes": llm.engine.pool.page_bytes,
        "pool_bytes": llm.engine.pool.budget_bytes,
    }


class Prompts:
    """Random prompts for a model; no two are alike.

    Args:
        llm: an engine with one model.
    """

    def __init__(self, llm: LLM) -> None:
        (info,) = llm.engine.models.values()
        self._vocab_size = info.vocab_size
        self._random = np.random.default_rng(SEED)

    def prompt(self, num_tokens: int) -> list[int]:
        """Token ids of a new prompt."""
        tokens: list[int] = self._random.integers(self._vocab_size, size=num_tokens).tolist()
        return tokens

    def workload(self, lengths: Sequence[int], num_outputs: int) -> Workload:
        """New prompts of these lengths, with equal outputs."""
        return Workload([self.prompt(length) for length in lengths], [num_outputs] * len(lengths))


def first_token_s(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds until all of these prompts, which arrive together, have their first token.

    Raises:
        EngineError: a request failed.
    """
    engine = llm.engine
    (model,) = engine.models
    start_s = time.perf_counter()
    for prompt in prompts:
        name = f"vattention-{next(_numbers)}"
        engine.add(Request(name, model, list(prompt), _ONE_TOKEN, time.monotonic()))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise EngineError(output.error)
    return time.perf_counter() - start_s


def decode(llm: LLM, workload: Workload, *, everything_mapped: bool = False) -> StepTimes:
    """Time the decode steps of a batch, once."""
    times = StepTimes(workload)
    with old_objects_left_out():
        times.run(llm, everything_mapped=everything_mapped)
    return times


def warm_up(llm: LLM, num_seqs: int) -> None:
    """Compile and capture what a batch of this size needs, with short prompts."""
    (info,) = llm.engine.models.values()
    inputs, outputs = (LengthRange(n, n) for n in _WARM_UP_TOKENS)
    decode(llm, Workload.random(num_seqs, inputs, outputs, info.vocab_size, SEED + 1))


class MapCalls:
    """Calls of a driver's `map`, with their times, while the context is open.

    Args:
        driver: the driver.

    Attributes:
        calls: (start, seconds, pages, whether the opening thread called) of each.
    """

    def __init__(self, driver: Driver) -> None:
        self.calls: list[tuple[float, float, int, bool]] = []
        self._driver: Any = driver
        self._thread = threading.get_ident()

    def __enter__(self) -> MapCalls:
        original = self._driver.map

        def timed(address: int, handles: Sequence[Handle]) -> None:
            start_s = time.perf_counter()
            original(address, handles)
            seconds = time.perf_counter() - start_s
            is_own = threading.get_ident() == self._thread
            self.calls.append((start_s, seconds, len(handles), is_own))

        self._driver.map = timed
        return self

    def __exit__(self, *_: object) -> None:
        del self._driver.map

    def figures(self, since_s: float) -> dict[str, Any]:
        """Calls and pages from a time on, by the loop's thread and by others."""
        found: dict[str, Any] = {}
        for name, is_own in (("in_loop", True), ("in_background", False)):
            some = [call for call in self.calls if call[0] >= since_s and call[3] is is_own]
            found[name] = {
                "calls": len(some),
                "pages": sum(pages for _, _, pages, _ in some),
                "seconds": sum(seconds for _, seconds, _, _ in some),
            }
        return found
