"""Requests to the four tiny models with their expected outputs, and engines to serve them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.memory.late_driver import LateDriver, LateFence
from tests.models.tiny import TinyModel, plan_tiny

from aquifer.cache import KV_CACHES
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.beam import BeamSearch
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import BeamSearchParams, Request, SamplingParams
from aquifer.engine.policies import Policies
from aquifer.engine.reports import ModelState
from aquifer.memory.budget import choose_prompt_page
from aquifer.memory.driver.base import Handle
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.pool import PROCESS, Kind
from aquifer.models import Planner

PAGE_BYTES = 4096
BEAM_WIDTH = 3
NUM_OUTPUT_TOKENS = 14
LEAST_MARGIN = 1e-3
"""Least distance of the two best tokens of a greedy output: batches differ in rounding."""

COMMON_TOKENS = 24
"""Tokens that half of a model's prompts begin with."""

each_kv_cache = pytest.mark.parametrize("kv_cache", KV_CACHES)


@dataclass(frozen=True)
class Case:
    """A request, and what it is answered."""

    prompt: list[int]
    params: SamplingParams
    completions: list[list[int]]
    finish_reason: str
    logprobs: list[float] = field(default_factory=list)  # of the first completion's tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.prompt) + NUM_OUTPUT_TOKENS


def greedy(tiny: TinyModel, prompt: Sequence[int]) -> tuple[list[int], list[float], float]:
    """The most probable tokens after a prompt, their log probabilities, and the least margin."""
    tokens = list(prompt)
    logprobs, margins = [], []
    for _ in range(NUM_OUTPUT_TOKENS):
        best = tiny.forward_all(tokens)[-1].log_softmax(-1).topk(2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(best.values[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], logprobs, min(margins)


def beams(
    logprobs: Callable[[tuple[int, ...]], torch.Tensor], prompt: Sequence[int], noise: torch.Tensor
) -> list[list[int]]:
    """The outputs of a beam search over log probabilities with some noise, [beams, vocab]."""
    search = BeamSearch(BEAM_WIDTH, BEAM_WIDTH, NUM_OUTPUT_TOKENS, frozenset(), 1.0, False)
    outputs: list[list[int]] = [[]]
    while not search.finished:
        rows = [logprobs((*prompt, *out)) for out in outputs]
        noisy = torch.stack(rows) + noise[: len(rows)]
        best = noisy.topk(search.num_candidates)
        chosen = search.advance(best.indices.numpy(), best.values.numpy())
        outputs = [[*outputs[parent], token] for parent, token in chosen]
    return [result.token_ids for result in search.results()]


def make_case(tiny: TinyModel, kind: str, prompt: list[int], random: Random) -> Case | None:
    """A request of some kind; None if rounding could change its outputs."""
    if kind == "beams":
        generator = torch.Generator().manual_seed(random.randrange(2**32))
        noise = torch.randn((3, BEAM_WIDTH, tiny.config["vocab_size"]), generator=generator)

        @cache  # searches that differ in noise ask for the same prefixes
        def next_logprobs(tokens: tuple[int, ...]) -> torch.Tensor:
            return tiny.forward_all(tokens)[-1].log_softmax(-1)

        found = [
            beams(next_logprobs, prompt, part)
            for part in noise * torch.tensor([0, 1e-4, 1e-4])[:, None, None]
        ]
        if found.count(found[0]) < len(found):
            return None
        search = BeamSearchParams(BEAM_WIDTH, NUM_OUTPUT_TOKENS, ignore_eos=True)
        return Case(prompt, search.sampling_params(), found[0], "length")
    tokens, logprobs, margin = greedy(tiny, prompt)
    if margin < LEAST_MARGIN:
        return None
    options: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_OUTPUT_TOKENS}
    if kind == "two":
        return Case(prompt, SamplingParams(n=2, **options), [tokens] * 2, "length")
    if kind == "logprobs":
        params = SamplingParams(logprobs=2, **options)
        return Case(prompt, params, [tokens], "length", logprobs)
    if kind == "stop":
        stop = tokens[random.randrange(2, NUM_OUTPUT_TOKENS - 2)]
        until_stop = tokens[: tokens.index(stop) + 1]
        return Case(prompt, SamplingParams(stop_token_ids=[stop], **options), [until_stop], "stop")
    return Case(prompt, SamplingParams(**options), [tokens], "length")


def make_cases(tiny: TinyModel, seed: int) -> list[Case]:
    """Requests of all kinds to one model."""
    random = Random(seed)

    def tokens(num_tokens: int) -> list[int]:
        return [random.randrange(tiny.config["vocab_size"]) for _ in range(num_tokens)]

    common = tokens(COMMON_TOKENS)
    cases: list[Case] = []
    for kind in ("greedy", "greedy", "two", "stop", "logprobs", "beams"):
        for prefix, lengths in ((common, (1, 13)), ([], (1, 70))):
            case = None
            while case is None:
                case = make_case(tiny, kind, [*prefix, *tokens(random.randint(*lengths))], random)
            cases.append(case)
    return cases


def longest_prompt(cases: Sequence[Case]) -> Case:
    """The request with the longest prompt."""
    return max(cases, key=lambda case: len(case.prompt))


class BehindDriver(LateDriver):
    """A device that has done nothing before it is waited for."""

    def fence(self) -> LateFence:  # type: ignore[override]
        self.launch(())
        return super().fence()


class LoopDriver(FaultyDriver):
    """Counts the calls of the engine's loop, and not those of the page stocker's thread."""

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        if threading.current_thread() is threading.main_thread():
            return super().create(page_bytes, count)
        handles = self.inner.create(page_bytes, count)
        self.live_handles.update(handles)
        return handles


@dataclass
class Sent:
    """A request in an engine, with what has come of it."""

    model: str
    case: Case
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by completion
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_ended: int = 0  # completions
    is_aborted: bool = False
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return (
            self.is_aborted
            or self.error is not None
            or self.num_ended == len(self.case.completions)
        )

    def receive(self, output: TokenOutput) -> None:
        """Note an output, which must come before the end and be what is expected."""
        assert not self.has_ended
        if output.finish_reason == "error":
            self.error = output.error
            return
        tokens = self.token_ids.setdefault(output.index, [])
        tokens += output.token_ids
        expected = self.case.completions[output.index]
        assert tokens == expected[: len(tokens)]
        for token, report in zip(output.token_ids, output.logprobs or [], strict=False):
            assert report.token_ids[0] == token
            self.logprobs.append(report.logprobs[0])
        self.num_cached_tokens += output.num_cached_tokens
        if output.finish_reason is not None:
            assert output.finish_reason == self.case.finish_reason
            assert tokens == expected
            self.num_ended += 1
            if output.index == 0 and self.case.logprobs:
                np.testing.assert_allclose(self.logprobs, self.case.logprobs, atol=1e-4)


class World:
    """An engine, and all requests that were sent to it; everything is checked after each step."""

    def __init__(
        self,
        folder: Path,
        memory_bytes: int,
        driver: LoopDriver,
        *,
        num_ahead: int = 0,
        models: dict[str, str] | None = None,
        planner: Planner = plan_tiny,
        policies: Policies | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.driver = driver
        self.checkpoints = dict(models or {})  # of the registered models, by name
        self.sent: dict[str, Sent] = {}
        self.num_preemptions = 0  # of models that were removed
        self._numbers = count()
        config = EngineConfig(
            tuple(self.spec(name, checkpoint) for name, checkpoint in self.checkpoints.items()),
            device="cpu",
            memory_bytes=memory_bytes,
            **{
                "page_bytes": PAGE_BYTES,
                "block_size": 4,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "swap_space_bytes": 1 << 20,
                "seed": 0,
                **options,
            },
        )
        self.engine = Engine.open(config, driver=driver, planner=planner, policies=policies)
        self.engine.num_ahead = num_ahead

    def spec(self, name: str, checkpoint: str) -> ModelSpec:
        return ModelSpec(name, self.folder / checkpoint)

    def add_model(self, name: str, checkpoint: str, *, load: bool = True) -> None:
        self.engine.add_model(self.spec(name, checkpoint), load=load)
        self.checkpoints[name] = checkpoint

    def remove_model(self, name: str) -> None:
        num_preemptions = self.engine.stats().num_preemptions.get(name, 0)
        self.engine.remove_model(name)
        self.num_preemptions += num_preemptions
        del self.checkpoints[name]

    def is_loaded(self, name: str) -> bool:
        return self.engine.lanes[name].is_resident

    def send(self, name: str, case: Case) -> Sent:
        request_id = f"{name} {next(self._numbers)}"
        self.engine.add(Request(request_id, name, case.prompt, case.params, 0.0))
        sent = self.sent[request_id] = Sent(name, case)
        return sent

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.sent[request_id].is_aborted = True

    def finished(self, sent: Sent) -> Sent:
        """Finish all requests; this one must have ended well."""
        self.finish()
        assert sent.error is None
        assert sent.has_ended
        return sent

    @property
    def open_requests(self) -> list[str]:
        return [request_id for request_id, sent in self.sent.items() if not sent.has_ended]

    def step(self) -> None:
        for output in self.engine.step():
            self.sent[output.request_id].receive(output)
        self.check()

    def finish(self) -> None:
        """Step until nothing is left; then each request has ended."""
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert not self.open_requests

    def check(self) -> None:
        """Compare the pool's accounts, owner by owner, with what models and caches say."""
        engine = self.engine
        engine.pool.check()
        usage, memory = engine.pool.usage(), engine.memory()
        assert engine.models.keys() == engine.lanes.keys() == self.checkpoints.keys()
        assert {owner.model for owner in usage.in_use_bytes} <= {*self.checkpoints, PROCESS.model}
        assert sum(usage.in_use_bytes.values()) + usage.free_bytes == usage.budget_bytes
        for name, model in memory.models.items():
            lane, by_kind = engine.lanes[name], model.bytes_by_kind
            status = engine.statuses[name]
            assert by_kind[Kind.WEIGHTS] == status.resident_bytes - status.shared_bytes
            if lane.is_resident:
                assert status.state == ModelState.RESIDENT
                assert status.resident_bytes == status.weight_bytes
            assert by_kind[Kind.KV] == model.kv_mapped_bytes
            assert lane.is_resident or not lane.running
            if not lane.running:
                assert by_kind[Kind.KV] == lane.slots.num_taken == 0
            held_bytes = 0 if lane.prefixes is None else lane.prefixes.stats.held_bytes
            if engine.config.kv_cache == "virtual":
                # A page is held as long as any of its blocks is.
                num_blocks = (choose_prompt_page(engine.config, engine.pool) or 1) // PAGE_BYTES
                assert by_kind[Kind.PREFIX] <= held_bytes * max(num_blocks, 1)
            if not lane.running:  # then prefixes have the pages that sequences had part in
                assert by_kind[Kind.PREFIX] >= held_bytes

    def used_bytes(self, name: str) -> int:
        """Bytes of all pages that a model has, registered or not."""
        in_use_bytes = self.engine.pool.usage().in_use_bytes
        return sum(n for owner, n in in_use_bytes.items() if owner.model == name)

    def close(self) -> None:
        self.engine.close()
        usage = self.engine.pool.usage()
        assert usage.free_bytes == usage.uncreated_bytes == usage.budget_bytes


Open = Callable[..., World]
"""Opens an engine, given the arguments of `World` but for folder and driver."""
