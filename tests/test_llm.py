"""The engine in the caller's process: several calls of `LLM` at a time, and interrupted ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.life import Case, make_cases
from tests.models.tiny import TINY_MODELS

from aquifer.bench.soak import check_idle
from aquifer.engine.engine import Engine
from aquifer.engine.in_flight import InFlight
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.runner import Runner
from aquifer.engine.step_input import StepInput
from aquifer.errors import EngineError, RequestError
from aquifer.llm import LLM
from aquifer.text import Delta

MODEL = "llama"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Requests with one completion each, with different ends."""
    return [case for case in make_cases(TINY_MODELS[MODEL], 0) if len(case.completions) == 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[MODEL].save(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(params=[0, 1])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(folder, memory="4MiB", page_size="4KiB", max_num_seqs=4) as llm:
        llm.engine.num_ahead = request.param
        yield llm
        check_idle(llm)


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def stream(llm: LLM, case: Case) -> Any:
    return llm.stream({"prompt_token_ids": case.prompt}, case.params)


def num_page_files() -> int:
    """Files of the host driver's pages that this process has open."""
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return sum("memfd:aquifer" in link for link in links)


def generate(llm: LLM, cases: list[Case]) -> list[list[int]]:
    outputs = llm.generate(
        [case.prompt for case in cases], [case.params for case in cases], use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


def test_an_idle_device_gets_a_step_before_all_requests_are_added(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as those that were added are enough work."""
    engine = llm.engine
    monkeypatch.setattr(Engine, "should_step", property(lambda self: num_new >= 2))
    num_new, added = 0, []
    add, step = engine.add, engine.step

    def counted_add(request: Request) -> None:
        nonlocal num_new
        num_new += 1
        add(request)

    def counted_step() -> list[TokenOutput]:
        nonlocal num_new
        added.append(num_new)
        num_new = 0
        return step()

    monkeypatch.setattr(engine, "add", counted_add)
    monkeypatch.setattr(engine, "step", counted_step)
    assert generate(llm, cases) == [case.completions[0] for case in cases]
    steps_while_adding = len(cases) // 2
    assert added[:steps_while_adding] == [2] * steps_while_adding


def test_the_longest_requests_begin_first(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a limit before all others; outputs are in the order of the prompts."""
    added: list[int | None] = []
    add = llm.engine.add

    def noted_add(request: Request) -> None:
        added.append(request.params.max_tokens)
        add(request)

    monkeypatch.setattr(llm.engine, "add", noted_add)
    limits = [3, 1, None, 3, 2]
    prompts = [case.prompt for case in cases[:5]]
    params = [SamplingParams(temperature=0, max_tokens=limit) for limit in limits]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert added == [None, 3, 3, 2, 1]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_streams_are_read_in_turn(llm: LLM, cases: list[Case]) -> None:
    """Each gets all of its own tokens, however its reads mix with those of the others."""
    streams = [stream(llm, case) for case in cases]
    received: list[list[Delta]] = [[] for _ in cases]
    left = list(range(len(cases)))
    while left:
        for i in list(left):
            for _ in range(i + 1):
                delta = next(streams[i], None)
                if delta is None:
                    left.remove(i)
                    break
                received[i].append(delta)
    assert [tokens_of(deltas) for deltas in received] == [case.completions[0] for case in cases]
    assert [deltas[-1].finish_reason for deltas in received] == [c.finish_reason for c in cases]


def test_other_calls_while_streams_are_open(llm: LLM, cases: list[Case]) -> None:
    streams = [stream(llm, case) for case in cases[:2]]
    received = [[next(one), next(one)] for one in streams]
    assert generate(llm, cases[2:]) == [case.completions[0] for case in cases[2:]]
    llm.pin_prefix({"prompt_token_ids": cases[3].prompt})
    received[0].append(next(streams[0]))
    assert generate(llm, cases[:1]) == cases[0].completions
    for deltas, one in zip(received, streams, strict=True):
        deltas += one
    assert [tokens_of(deltas) for deltas in received] == [c.completions[0] for c in cases[:2]]
    llm.unpin_prefix({"prompt_token_ids": cases[3].prompt})


def test_a_stream_that_is_closed_leaves_others_alone(llm: LLM, cases: list[Case]) -> None:
    first, second = (stream(llm, case) for case in cases[:2])
    next(first)
    deltas = [next(second)]
    first.close()
    deltas += second
    assert tokens_of(deltas) == cases[1].completions[0]
    assert not llm.engine.has_work


def test_requests_of_the_engine_itself(llm: LLM, cases: list[Case]) -> None:
    """They do not disturb the calls that run beside them."""
    (name,) = llm.engine.models
    llm.engine.add(Request("own", name, cases[1].prompt, cases[1].params, 0.0))
    assert generate(llm, cases[:1]) == cases[0].completions


def test_a_stream_ends_if_its_request_was_ended(folder: Path, cases: list[Case]) -> None:
    with LLM(folder, memory="4MiB", page_size="4KiB") as llm:
        one = stream(llm, cases[0])
        next(one)
    with pytest.raises(EngineError, match="ended before"):
        next(one)


def test_a_call_that_is_interrupted(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in each launch in turn: its requests are gone, and later ones get their tokens."""
    launch = Runner.launch
    left = 0

    def interrupted(runner: Runner, step: StepInput) -> InFlight:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt
        return launch(runner, step)

    monkeypatch.setattr(Runner, "launch", interrupted)
    num_interrupts = 0
    while True:
        left = num_interrupts
        try:
            generate(llm, cases[:3])
        except KeyboardInterrupt:
            num_interrupts += 1
        else:
            break
        left = -1
        stats = llm.engine.stats()
        assert not any([*stats.num_running.values(), *stats.num_waiting.values()])
        assert generate(llm, cases) == [case.completions[0] for case in cases]
    assert num_interrupts > 10


def test_an_interrupt_ends_the_streams_whose_step_it_was(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stream(llm, cases[0])
    next(one)

    def interrupted(runner: Runner, step: StepInput) -> InFlight:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, cases[1:])
    with pytest.raises(EngineError, match="failed: KeyboardInterrupt"):
        list(one)
    assert generate(llm, cases) == [case.completions[0] for case in cases]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5.0, "a prompt is of type float"),
        ([[1], None], "a prompt is of type NoneType"),
        ({"prompt": 5}, "a prompt is of type int"),
        ({"cache_salt": "a"}, "needs 'prompt_token_ids' or 'prompt'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, "has 'multi_modal_data', which is not"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any, words: str) -> None:
    prompts = prompt if isinstance(prompt, list) else [prompt]
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, SamplingParams(max_tokens=1))


def test_what_is_no_list_of_prompts_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="a prompt is of type int"):
        llm.generate(5)  # type: ignore[arg-type]


def test_prompts_as_arrays_and_from_a_generator(llm: LLM, cases: list[Case]) -> None:
    expected = [case.completions[0] for case in cases[:2]]
    params = [case.params for case in cases[:2]]
    prompts = [np.array(case.prompt) for case in cases[:2]]
    for given in (prompts, (prompt for prompt in prompts)):
        outputs = llm.generate(given, params)  # type: ignore[arg-type]
        assert [output.outputs[0].token_ids for output in outputs] == expected
    (output,) = llm.generate(prompts[0], params[0])  # type: ignore[arg-type]
    assert output.outputs[0].token_ids == expected[0]


def test_parameters_as_a_mapping_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="write SamplingParams"):
        llm.generate([[1]], {"max_tokens": 1})  # type: ignore[arg-type]


def test_what_is_closed_says_so(folder: Path) -> None:
    with LLM(folder, memory="4MiB", page_size="4KiB") as llm:
        pass
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.generate([[1, 2]])
    with pytest.raises(EngineError, match="this LLM is closed"):
        next(llm.stream([1, 2]))


def test_what_is_dropped_releases_its_memory(folder: Path) -> None:
    num_before = num_page_files()
    llm = LLM(folder, memory="4MiB", page_size="4KiB")
    llm.generate([[1, 2]], use_tqdm=False)
    assert num_page_files() > num_before
    del llm
    gc.collect()
    assert num_page_files() == num_before


def test_closing_twice_does_no_harm(folder: Path) -> None:
    with LLM(folder, memory="4MiB", page_size="4KiB") as llm:
        llm.close()
    llm.close()


def test_a_request_without_a_reader_is_ended(llm: LLM) -> None:
    """The engine takes it, but what turns its tokens into text cannot be made."""
    llm.tokenizer = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        llm.generate([[1, 2]], SamplingParams(), use_tqdm=False)
    assert not llm.engine.has_work
