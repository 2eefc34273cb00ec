"""Threads of a step: by the option, the environment, or the size of its matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import llama_config, llama_weights, save_checkpoint

from aquifer.cache.base import KVView
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine import threads
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.threads import (
    Products,
    ThreadControl,
    ThreadLimit,
    choose_threads,
    torch_threads,
)
from aquifer.models.base import ModelInput
from aquifer.models.decoder import Decoder
from aquifer.weights.parameters import Parameter

DEMO = Products(count=25, num_elements=2_750_000, num_bytes=11_000_000)
LLAMA_8B = Products(count=226, num_elements=8_030_000_000, num_bytes=16_060_000_000)
PROMPT_TOKENS = 200


# --- the choice ------------------------------------------------------------------------------


def test_products_are_the_parameters_with_rows_and_columns() -> None:
    parameters = [
        Parameter("a", (64, 32), torch.float32, ()),
        Parameter("bias", (64,), torch.float32, ()),
        Parameter("experts", (4, 16, 32), torch.bfloat16, ()),
    ]
    assert Products.of(parameters) == Products(2, 64 * 32 + 4 * 16 * 32, 4 * 64 * 32 + 2 * 2048)


def test_a_product_waits_for_its_weight_or_computes() -> None:
    weights_s = LLAMA_8B.mean_s(1)
    assert LLAMA_8B.mean_s(2) == weights_s
    assert LLAMA_8B.mean_s(1000) == pytest.approx(2 * LLAMA_8B.mean_s(500))
    assert LLAMA_8B.mean_s(1000) > 10 * weights_s


@pytest.mark.parametrize(
    ("products", "num_tokens", "most", "num_threads"),
    [
        (DEMO, 1, 2, 1),
        (DEMO, 8, 64, 1),
        (DEMO, 512, 2, 2),
        (DEMO, 512, 64, 16),
        (LLAMA_8B, 1, 2, 2),
        (LLAMA_8B, 1, 6, 6),
        (LLAMA_8B, 2048, 96, 96),
        (Products(0, 0, 0), 1000, 8, 1),
    ],
)
def test_threads_by_the_size_of_the_step(
    products: Products, num_tokens: int, most: int, num_threads: int
) -> None:
    assert choose_threads(products, num_tokens, ThreadLimit(most, False)) == num_threads


def test_more_tokens_never_get_fewer_threads() -> None:
    for most in (1, 2, 6, 48):
        limit = ThreadLimit(most, False)
        chosen = [choose_threads(DEMO, num_tokens, limit) for num_tokens in range(1, 3000, 7)]
        assert chosen == sorted(chosen)
        assert (chosen[0], chosen[-1]) == (1, most)
        assert all(number == most or number.bit_count() == 1 for number in chosen)


@pytest.mark.parametrize("products", [DEMO, LLAMA_8B])
@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_a_number_that_the_user_set_is_not_changed(products: Products, num_tokens: int) -> None:
    assert choose_threads(products, num_tokens, ThreadLimit(3, True)) == 3


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        (None, {}, ThreadLimit(2, False)),  # the quota is below what torch would use
        (None, {"OMP_NUM_THREADS": ""}, ThreadLimit(2, False)),
        (None, {"OMP_NUM_THREADS": "4"}, ThreadLimit(4, True)),
        (None, {"MKL_NUM_THREADS": "4"}, ThreadLimit(4, True)),
        (7, {}, ThreadLimit(7, True)),
        (1, {"OMP_NUM_THREADS": "4"}, ThreadLimit(1, True)),
    ],
)
def test_the_option_wins_over_the_environment_and_that_over_the_machine(
    option: int | None, environment: dict[str, str], expected: ThreadLimit
) -> None:
    assert ThreadLimit.of(option, environment, num_torch_threads=4, num_cpus=2) == expected


def test_no_more_threads_than_torch_would_use() -> None:
    assert ThreadLimit.of(None, {}, num_torch_threads=4, num_cpus=8) == ThreadLimit(4, False)


# --- trials ----------------------------------------------------------------------------------


def paces(control: ThreadControl, num_steps: int, seconds_of: Callable[[int], float]) -> list[int]:
    """Threads of steps that take as long as given for each number of threads."""
    chosen = []
    for _ in range(num_steps):
        num_threads = control.choose(2048)
        chosen.append(num_threads)
        seconds = seconds_of(num_threads)
        # Threads are interrupted where there are more of them than free CPUs.
        is_contended = num_threads > 1 and seconds > 1
        control.observe(2048, seconds, 1000 if is_contended else 0)
    return chosen


def test_fewer_threads_where_others_are_busy_and_more_when_they_are_gone() -> None:
    control = ThreadControl(LLAMA_8B, ThreadLimit(4, False))
    idle = paces(control, 100, lambda num_threads: 1 / num_threads)
    assert set(idle) == {4}, "nothing is tried on an idle machine"
    busy = paces(control, 400, lambda num_threads: {4: 8.0, 2: 4.0, 1: 1.0}[num_threads])
    assert busy[-1] == 1
    assert busy.count(1) > 300
    # What is tried costs little: two threads now and then.
    assert busy[100:].count(2) <= 300 / 20
    assert 4 not in busy[100:]
    idle = paces(control, 200, lambda num_threads: 1 / num_threads)
    assert idle[-1] == 4
    assert idle.count(4) > 100


def test_trials_that_bring_nothing_are_not_kept() -> None:
    """The process is interrupted often, and fewer threads are still slower."""
    control = ThreadControl(LLAMA_8B, ThreadLimit(2, False))
    chosen = paces(control, 200, lambda num_threads: 4.0 / num_threads)
    assert chosen.count(1) <= 200 / 20
    assert chosen.count(1) > 1, "it is tried again, as others may come"


def test_nothing_is_tried_where_the_user_set_the_number_or_steps_are_small() -> None:
    control = ThreadControl(LLAMA_8B, ThreadLimit(3, True))
    assert set(paces(control, 100, lambda num_threads: 8.0)) == {3}
    control = ThreadControl(DEMO, ThreadLimit(8, False))
    for _ in range(100):
        assert control.choose(1) == 1
        control.observe(1, 8.0, 1000)


# --- torch -----------------------------------------------------------------------------------


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of two CPUs, without variables that set its threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_former_number_comes_back() -> None:
    seen = []

    def fail() -> None:
        with torch_threads(3), torch_threads(1):
            seen.append(torch.get_num_threads())
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert seen == [1]
    assert torch.get_num_threads() == 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts are worth two threads, and whose decode steps are not."""
    config = llama_config(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    return save_checkpoint(
        tmp_path_factory.mktemp("threads") / "m", config, llama_weights(config, 0)
    )


def _threads_of_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[int, int]]:
    """(tokens, torch's threads) of the steps of one request."""
    seen = []
    forward = Decoder.forward

    def watched(model: Decoder, batch: ModelInput, kv: KVView) -> torch.Tensor:
        seen.append((len(batch.token_ids), torch.get_num_threads()))
        return forward(model, batch, kv)

    monkeypatch.setattr(Decoder, "forward", watched)
    config = EngineConfig(
        (ModelSpec("m", checkpoint),), device="cpu", memory_bytes=32 << 20, **options
    )
    with closing(Engine.open(config)) as engine:
        seen.clear()  # of the step that a model runs before it is ready
        prompt = [index % 300 for index in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        engine.add(Request("r", "m", prompt, params, time.monotonic()))
        while engine.has_work:
            engine.step()
    return seen


@pytest.mark.usefixtures("two_threads")
def test_steps_run_with_the_threads_that_they_are_worth(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _threads_of_steps(checkpoint, monkeypatch)
    assert steps == [(PROMPT_TOKENS, 2), (1, 1), (1, 1)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_option_holds_for_every_step(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _threads_of_steps(checkpoint, monkeypatch, threads=3)
    assert steps == [(PROMPT_TOKENS, 3), (1, 3), (1, 3)]


@pytest.mark.usefixtures("two_threads")
def test_the_environment_holds_for_every_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    steps = _threads_of_steps(checkpoint, monkeypatch)
    assert steps == [(PROMPT_TOKENS, 2), (1, 2), (1, 2)]
