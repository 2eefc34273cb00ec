"""States that few requests reach, found by random ones: none ends the engine or stops a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.architectures import HYBRIDS, OUR_DECODER, VOCAB_SIZE, save_tiny

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import CapacityError

PAGE_BYTES = 4096
ROOMY_BYTES = 64 << 20

OpenEngine = Callable[..., Engine]


@pytest.fixture
def open_engine(tmp_path: Path) -> OpenEngine:
    """Opens engines with tiny models, named by their architectures."""

    def open_engine(*names: str, memory_bytes: int = ROOMY_BYTES, **options: Any) -> Engine:
        specs = []
        for name in names:
            folder = tmp_path / name
            if not folder.exists():
                save_tiny((OUR_DECODER | HYBRIDS)[name](), folder, 1)
            specs.append(ModelSpec(name, folder))
        config = EngineConfig(
            tuple(specs),
            device="cpu",
            memory_bytes=memory_bytes,
            page_bytes=PAGE_BYTES,
            block_size=4,
            max_num_seqs=8,
            preemption_mode="recompute",
            swap_space_bytes=0,
            **options,
        )
        return Engine.open(config)

    return open_engine


def prompt_of(random: Random, length: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def run(engine: Engine) -> dict[str, list[int]]:
    """Run to the end; returns the first completion's tokens of each request."""
    tokens: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.index == 0:
                tokens[output.request_id] += output.token_ids
    return tokens


@pytest.mark.parametrize("kv_cache", ["virtual", "paged"])
def test_prompt_log_probabilities_of_a_completion_that_is_gone(
    open_engine: OpenEngine, kv_cache: str
) -> None:
    """The first completion ends with its first token; then the second reads the prompt again."""
    params = SamplingParams(n=2, prompt_logprobs=0, seed=3, max_tokens=1)
    with closing(open_engine("llama", kv_cache=kv_cache)) as engine:
        engine.add(Request("r", "llama", list(range(5, 45)), params, 0.0))
        ended: list[int] = []
        while not ended:
            ended += [output.index for output in engine.step() if output.finish_reason]
        assert ended == [0]
        engine.unload_model("llama")  # which preempts what runs
        run(engine)


@pytest.mark.parametrize("kv_cache", ["virtual", "paged"])
def test_a_completion_is_aborted_while_its_request_waits(
    open_engine: OpenEngine, kv_cache: str
) -> None:
    """What it had found of its own tokens is nothing for the completion that is left."""
    random = Random(0)
    with closing(open_engine("llama", kv_cache=kv_cache)) as engine:
        footprint = engine.lanes["llama"].cache.footprint
        weight_bytes = engine.models["llama"].weight_bytes
    memory_bytes = weight_bytes + (footprint.most(10, 70, 2) + 1) * PAGE_BYTES
    options = {"kv_cache": kv_cache, "memory_bytes": memory_bytes}
    with closing(open_engine("llama", **options)) as engine:
        first = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        second = SamplingParams(n=2, seed=0, max_tokens=60, ignore_eos=True)
        engine.add(Request("first", "llama", prompt_of(random, 30), first, 0.0))
        engine.add(Request("second", "llama", prompt_of(random, 10), second, 0.0))
        lane, is_aborted = engine.lanes["llama"], False
        while engine.has_work:
            engine.step()
            waiting = list(lane.waiting)
            match = waiting[0].match if waiting else None
            if match is not None and match.num_tokens > 12 and not is_aborted:
                engine.abort("second", 0)
                is_aborted = True
        assert is_aborted


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("kv_cache", ["virtual", "paged"])
def test_a_model_that_needs_a_page_is_not_kept_waiting_by_one_that_needs_none(
    open_engine: OpenEngine, kv_cache: str, num_ahead: int
) -> None:
    """It can preempt only if no step is in flight, and a model without KV always has steps."""
    names, random = ("llama", "mamba2"), Random(1)
    options: dict[str, Any] = {"kv_cache": kv_cache, "enable_prefix_caching": False}
    with closing(open_engine(*names, **options)) as engine:
        lanes = engine.lanes
        num_pages = lanes["llama"].cache.footprint.most(30, 120, 1)
        num_pages += lanes["mamba2"].cache.footprint.most(5, 120, 1) + 4
        weight_bytes = sum(info.weight_bytes for info in engine.models.values())
    options["memory_bytes"] = weight_bytes + num_pages * PAGE_BYTES
    with closing(open_engine(*names, **options)) as engine:
        engine.num_ahead = num_ahead
        for name in names:  # else they take turns with their weights, by the time that each had
            engine.pin_model(name)
        params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        for number in range(2):
            engine.add(Request(f"a{number}", "llama", prompt_of(random, 30), params, 0.0))
        params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
        engine.add(Request("b", "mamba2", [1, 2, 3, 4, 5], params, 0.0))
        num_ended = num_without = most_without = 0
        while num_ended < 2:
            outputs = engine.step()
            of_first = [output for output in outputs if output.request_id != "b"]
            num_ended += sum(output.finish_reason is not None for output in of_first)
            num_without = 0 if of_first else num_without + 1
            most_without = max(most_without, num_without)
        assert most_without < 20
        engine.abort("b")


def test_a_prompt_begins_like_another_where_frequencies_depend_on_its_length(
    open_engine: OpenEngine,
) -> None:
    """The rotary embedding is of the type "dynamic", and the prompts are beyond its context."""
    random = Random(0)
    short = prompt_of(random, 40)
    long = short + prompt_of(random, 40)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    found = []
    for prompts in ([long], [short, long]):
        with closing(open_engine("llama-dynamic")) as engine:
            for prompt in prompts:
                engine.add(Request("r", "llama-dynamic", prompt, params, 0.0))
                tokens = run(engine)["r"]
            found.append(tokens)
    assert found[0] == found[1]


def test_a_request_that_never_fits_beside_a_pinned_model_is_refused(
    open_engine: OpenEngine,
) -> None:
    with closing(open_engine("llama", "gpt2")) as engine:
        num_pages = engine.lanes["llama"].cache.footprint.most(10, 70, 1) + 1
        weight_bytes = sum(info.weight_bytes for info in engine.models.values())
    memory_bytes = weight_bytes + num_pages * PAGE_BYTES
    with closing(open_engine("llama", "gpt2", memory_bytes=memory_bytes)) as engine:
        params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
        request = Request("r", "llama", prompt_of(Random(1), 10), params, 0.0)
        engine.pin_model("gpt2")
        run(engine)
        with pytest.raises(CapacityError):
            engine.add(request)
        engine.unpin_model("gpt2")
        engine.add(request)
        assert len(run(engine)["r"]) == 110
