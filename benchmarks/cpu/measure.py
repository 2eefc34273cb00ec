"""One measurement of one tree, repeated on demand: the other half of `compare.py`.

    python -m benchmarks.cpu.measure NAME

`aquifer` is the one that PYTHONPATH names. The process sets its measurement up, writes a line that
says which files it imported, and then for each line of its input runs once and writes a line of
JSON: for each quantity `wall_s` and `cpu_s` of the process, `tokens` where it has a rate, and
`work`, which must be the same in both trees.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.cpu.either import Books, ReplayConfig, Request, SamplingParams, open_books
from benchmarks.cpu.traces import conversations, lengths, shared_prefixes

import aquifer
from aquifer import LLM
from aquifer.bench.workload import LengthRange, Workload
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.memory.stock import PageStocker
from aquifer.sim.device import find_device, find_model
from aquifer.sim.replay import replay

_TINY_LLAMA = Path(__file__).resolve().parent / "models" / "tiny-llama"


@dataclass(slots=True)
class Cost:
    """What one run of a quantity cost."""

    wall_s: float
    cpu_s: float
    tokens: int = 0
    work: str = ""


@dataclass(slots=True)
class Timer:
    """Times of equal parts of a run, by the clock and in CPU time of the process."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Time one part."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)

    def mean(self, count: int, **facts: Any) -> Cost:
        """The whole time by `count`."""
        return Cost(sum(self.wall_s) / count, sum(self.cpu_s) / count, **facts)

    def percentile(self, percent: float, **facts: Any) -> Cost:
        """A percentile of the parts."""
        wall, cpu = (float(np.percentile(part, percent)) for part in (self.wall_s, self.cpu_s))
        return Cost(wall, cpu, **facts)


Run = Callable[[], dict[str, Cost]]
"""Runs a measurement once."""


# --- scheduler and cache, without a model --------------------------------------------------------

_NUM_STEPS = 192
_MAX_PROMPT_TOKENS = 64
_MODEL_S = 0.001  # stands for the model's step time


def steps(resources: ExitStack) -> Run:
    """plan + commit + reserve of a decode step, as `aquifer bench overhead` has it.

    Pages were used before: to create new ones is the operating system's time.
    """
    layout = KVLayout((LayerKV(1, 4, 4),) * 12, torch.float32)
    cases = []
    for num_seqs in (256, 1000):
        for kv_name in ("virtual", "paged"):
            books = open_books(
                resources,
                kv_name,
                layout,
                max_seqs=num_seqs,
                max_tokens=_MAX_PROMPT_TOKENS + _NUM_STEPS + 1,
                max_batched_tokens=num_seqs * _MAX_PROMPT_TOKENS,
                pool_bytes=1 << 30,
                page_bytes=4096,  # 10.7 tokens, as in that benchmark
            )
            stocker = PageStocker(books.pool)
            stocker.start()
            resources.callback(stocker.close)
            cases.append((f"{num_seqs} sequences, {kv_name}", num_seqs, books, stocker))

    def run() -> dict[str, Cost]:
        costs = {}
        for name, num_seqs, books, stocker in cases:
            timer = _decode(books, num_seqs, stocker)
            costs[f"step of {name}"] = timer.percentile(50)
            costs[f"step of {name}, p99"] = timer.percentile(99)
        return costs

    return run


def _decode(books: Books, num_seqs: int, stocker: PageStocker) -> Timer:
    """Run sequences from their prompt to their end; returns the times of decode steps."""
    rng = np.random.default_rng(0)
    for number in range(num_seqs):
        # Prompt lengths differ, so that sequences do not all need a page in the same step.
        books.add(number, [1] * int(rng.integers(1, _MAX_PROMPT_TOKENS + 1)), _NUM_STEPS + 1)
    books.commit(books.scheduler.plan())
    timer = Timer()
    for _ in range(_NUM_STEPS):
        stocker.wake()
        time.sleep(_MODEL_S)
        with timer.part():
            plan = books.scheduler.plan()
            books.view(plan)
            books.commit(plan)
    assert not books.scheduler.has_work
    return timer


_LONG_TOKENS = 131_072
_MORE_TOKENS = 8192


def blocked(resources: ExitStack) -> Run:
    """plan() while the first in the queue, which is cached but for its end, finds no room."""
    layout = KVLayout((LayerKV(2, 32, 32),), torch.float16)
    page_bytes = 4096  # 16 tokens
    num_pages = (_LONG_TOKENS + _MORE_TOKENS // 2) * layout.token_bytes // page_bytes
    books = open_books(
        resources,
        "virtual",
        layout,
        max_seqs=4,
        max_tokens=2 * _LONG_TOKENS,
        max_batched_tokens=2 * _LONG_TOKENS,
        pool_bytes=num_pages * page_bytes,
        page_bytes=page_bytes,
        keeps_prefixes=True,
    )
    long = np.random.default_rng(0).integers(2, 200, _LONG_TOKENS).tolist()
    books.add(0, long, 1)
    books.commit(books.scheduler.plan())
    running = books.add(1, [1] * 64, _LONG_TOKENS)
    books.commit(books.scheduler.plan())
    resources.callback(books.scheduler.abort, books.lane, running)

    def plans(count: int) -> Timer:
        timer = Timer()
        for _ in range(count):
            with timer.part():
                plan = books.scheduler.plan()
            books.commit(plan)
        return timer

    def run() -> dict[str, Cost]:
        empty = plans(50).percentile(50)
        head = books.add(2, [*long, *range(2, 2 + _MORE_TOKENS)], 1)
        waiting = plans(50).percentile(50)
        assert list(books.lane.waiting) == [head]
        books.scheduler.abort(books.lane, head)
        return {
            "plan, nothing waits": empty,
            "plan, a blocked head of 139k tokens, 131k cached": waiting,
        }

    return run


# --- the engine ----------------------------------------------------------------------------------


def _open_engine(resources: ExitStack, **options: Any) -> Engine:
    """An engine of the tiny Llama with random weights and a longer context."""
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    config = json.loads((_TINY_LLAMA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    values: dict[str, Any] = {
        "device": "cpu",
        "load_format": "dummy",
        "memory_bytes": 256 << 20,
        "kv_cache": "paged",
        "max_num_waiting": 1 << 20,
        "seed": 0,
    }
    engine = Engine.open(EngineConfig((ModelSpec("tiny", folder),), **{**values, **options}))
    resources.callback(engine.close)
    return engine


def _request(name: str, prompt: list[int], **params: Any) -> Any:
    return Request(name, "tiny", prompt, SamplingParams(**params), time.monotonic())


def _prompts(seed: int, count: int, num_tokens: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 250, num_tokens).tolist() for _ in range(count)]


def _pin(engine: Engine, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        engine.pin_prefix("tiny", prompt)
    while engine.has_work:
        engine.step()


def add(resources: ExitStack) -> Run:
    """`Engine.add` of a request of 100 tokens, with and without pinned prefixes."""
    engines = {"nothing pinned": _open_engine(resources)}
    engines["8 pinned prefixes of 2000 tokens"] = engine = _open_engine(resources)
    _pin(engine, _prompts(0, 8, 2000))
    prompts = _prompts(1, 50, 100)

    def run() -> dict[str, Cost]:
        costs = {}
        for name, engine in engines.items():
            timer = Timer()
            requests = [
                _request(str(i), prompt, max_tokens=100) for i, prompt in enumerate(prompts)
            ]
            with timer.part():
                for request in requests:
                    engine.add(request)
            for request in requests:
                engine.abort(request.request_id)
            costs[f"add, {name}"] = timer.mean(len(prompts))
        return costs

    return run


_NUM_CALLS = 100


def stats(resources: ExitStack) -> Run:
    """`Engine.stats()` with no cached block, and with 20 000 of them, half of them pinned."""
    engines = {"no cached block": _open_engine(resources)}
    engines["20 000 cached blocks"] = engine = _open_engine(
        resources, block_size=4, max_num_seqs=16
    )
    prompts = _prompts(0, 80, 1001)  # a block is known when its successor has begun
    _pin(engine, [prompt[:1000] for prompt in prompts[:40]])
    for number, prompt in enumerate(prompts[40:]):
        engine.add(_request(str(number), prompt, max_tokens=1))
    while engine.has_work:
        engine.step()
    prefixes = engine.lanes["tiny"].prefixes
    assert prefixes is not None
    assert prefixes.stats.held_blocks >= 20_000

    def run() -> dict[str, Cost]:
        costs = {}
        for name, engine in engines.items():
            timer = Timer()
            with timer.part():
                for _ in range(_NUM_CALLS):
                    engine.stats()
            costs[f"stats, {name}"] = timer.mean(_NUM_CALLS)
        return costs

    return run


def mixed(resources: ExitStack) -> Run:
    """A decode step of 64 requests, one of which asks for what the others do not."""
    engine = _open_engine(resources, enable_prefix_caching=False)
    prompts = _prompts(0, 64, 16)
    cases: dict[str, dict[str, Any]] = {
        "64 requests alike": {},
        "one with log probabilities": {"logprobs": 5},
        "one with min_tokens": {"min_tokens": 190},
    }

    def run() -> dict[str, Cost]:
        costs = {}
        for name, params in cases.items():
            for number, prompt in enumerate(prompts):
                extra = {} if number else params
                ends = {} if extra else {"ignore_eos": True}
                engine.add(
                    _request(str(number), prompt, max_tokens=200, temperature=0, **extra, **ends)
                )
            timer = Timer()
            tokens = hashlib.sha256()
            for number in range(160):
                with timer.part():
                    outputs = engine.step()
                if number < 10:
                    timer = Timer()
                tokens.update(json.dumps([(o.request_id, o.token_ids) for o in outputs]).encode())
            for number in range(len(prompts)):
                engine.abort(str(number))
            while engine.has_work:
                engine.step()
            costs[f"engine step, {name}"] = timer.percentile(50, work=tokens.hexdigest()[:12])
        return costs

    return run


# --- replay and throughput -----------------------------------------------------------------------


def replays(resources: ExitStack) -> Run:
    """Replays of made-up traces."""
    models = {"llama-2-13b": find_model("llama-2-13b")}
    device = find_device("a100-40g")
    cases = {
        "conversations like Azure's": (ReplayConfig(models, device), conversations(600, 2.0)),
        "long outputs": (
            ReplayConfig(models, device),
            lengths(2, 120, (16, 64), (500, 2000), 1.0),
        ),
        "overload with preemptions": (
            ReplayConfig(models, device, manager="paged"),
            lengths(3, 160, (64, 512), (200, 1500), 20.0),
        ),
        "prefixes with evictions": (
            ReplayConfig(models, device, prefix_caching=True),
            shared_prefixes(200, 1.0),
        ),
    }

    def run() -> dict[str, Cost]:
        costs = {}
        for name, (config, requests) in cases.items():
            timer = Timer()
            with timer.part():
                result = replay(config, requests)
            served = [record for record in result.records if record.finished_s is not None]
            work = (
                f"{len(served)} requests, {result.num_steps} steps, {result.num_preemptions} "
                f"preemptions, {result.hit_tokens} cached tokens, {result.duration_s:.6f} s"
            )
            tokens = sum(record.prompt_tokens + record.output_tokens for record in served)
            costs[f"replay, {name}"] = timer.mean(1, tokens=tokens, work=work)
        return costs

    return run


def throughput(resources: ExitStack) -> Run:
    """Output tokens a second of whole engines with random and with real weights."""
    options: dict[str, Any] = {
        "device": "cpu",
        "memory": "256MiB",
        "enable_prefix_caching": False,
        "seed": 0,
    }
    tiny = resources.enter_context(LLM(_TINY_LLAMA, load_format="dummy", **options))
    demo = resources.enter_context(LLM("demo", **options))
    many = LengthRange(16, 128)
    cases = {
        "tiny-llama, 32 requests": (tiny, Workload.random(32, many, many, 256, 0)),
        "demo model, 1 request": (
            demo,
            Workload.random(1, LengthRange(64, 64), LengthRange(128, 128), 2048, 0),
        ),
        "demo model, 8 requests": (demo, Workload.random(8, many, many, 2048, 0)),
    }

    def run() -> dict[str, Cost]:
        costs = {}
        for name, (llm, workload) in cases.items():
            params = [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                for count in workload.output_lengths
            ]
            timer = Timer()
            with timer.part():
                outputs = llm.generate(workload.prompts, params, use_tqdm=False)
            token_ids = [output.outputs[0].token_ids for output in outputs]
            costs[f"generate, {name}"] = timer.mean(
                1,
                tokens=workload.num_output_tokens,
                work=hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:12],
            )
        return costs

    return run


MEASUREMENTS: dict[str, Callable[[ExitStack], Run]] = {
    "steps": steps,
    "add": add,
    "stats": stats,
    "blocked": blocked,
    "mixed": mixed,
    "replays": replays,
    "throughput": throughput,
}
"""Set-up of each measurement, by name. What is opened goes onto the stack."""


def main() -> None:
    """Set up the measurement that the command line names, and run it for each line of input."""
    with ExitStack() as resources:
        run = MEASUREMENTS[sys.argv[1]](resources)
        print(json.dumps({"imported": aquifer.__file__}), flush=True)
        for _ in sys.stdin:
            gc.collect()
            print(json.dumps({k: asdict(cost) for k, cost in run().items()}), flush=True)


if __name__ == "__main__":
    main()
