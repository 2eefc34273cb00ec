"""The trial whether a model's steps can be captured, with stand-ins for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.architectures import TRANSFORMERS, save_tiny
from tests.models.serving import loaded_model

from aquifer.cache.base import KVView
from aquifer.errors import InvariantError
from aquifer.models import Model, ModelInput
from aquifer.models.transformers import TransformersPlan
from aquifer.models.transformers.trial import Capture, can_be_captured
from aquifer.weights.checkpoint import Checkpoint

MAX_TOKENS = 64
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["helium", "granitemoe"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(TRANSFORMERS[request.param](), folder)
    with loaded_model(Checkpoint.open(folder), TransformersPlan) as model:
        yield model


class Changed:
    """A model that gives other inputs to another one, by `change`."""

    is_capturable = False

    def __init__(self, model: Model, change: Callable[[ModelInput], ModelInput]) -> None:
        self.kv_layout = model.kv_layout
        self.vocab_size = model.vocab_size
        self._model = model
        self._change = change

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        return self._model.forward(self._change(batch), kv)

    def rehearsal(self) -> Changed:
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def exact(work: Callable[[], None]) -> Callable[[], None]:
    """A graph that does what the code does."""
    work()
    return work


class Outcome:
    """What the log says about the last trial."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log

    def __call__(self, model: Model, capture: Capture, max_tokens: int = MAX_TOKENS) -> str | None:
        """Why the model cannot be captured; None if it can."""
        self._log.clear()
        if can_be_captured(model, "AcmeForCausalLM", max_tokens, CPU, capture):
            assert not self._log.messages
            return None
        (message,) = self._log.messages
        assert message.startswith("steps of AcmeForCausalLM run kernel by kernel, because")
        return message.partition("CUDA graphs: ")[2]


@pytest.fixture
def obstacle(caplog: pytest.LogCaptureFixture) -> Outcome:
    return Outcome(caplog)


@pytest.mark.parametrize("max_tokens", [2, MAX_TOKENS])
def test_a_graph_of_the_same_results(obstacle: Outcome, model: Model, max_tokens: int) -> None:
    assert obstacle(model, exact, max_tokens) is None


def test_a_graph_that_ignores_its_inputs(obstacle: Outcome, model: Model) -> None:
    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    assert obstacle(model, capture) == (
        "a graph of 1 tokens computes other logits than its own code"
    )


@pytest.mark.parametrize("name", ["token_ids", "positions"])
def test_a_value_that_was_read_on_the_host(obstacle: Outcome, model: Model, name: str) -> None:
    """It is the same in every run of the graph, for steps of several tokens."""
    seen: list[torch.Tensor] = []
    is_replaying = False

    def change(batch: ModelInput) -> ModelInput:
        if len(batch.token_ids) == 1:
            return batch
        if not is_replaying:
            seen[:] = [getattr(batch, name).clone()]
        parts = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "context_lengths": batch.context_lengths,
        }
        parts[name] = seen[0]
        return ModelInput(**parts, wanted=batch.wanted)

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        captured = seen[:]

        def replay() -> None:
            nonlocal is_replaying
            is_replaying, seen[:] = True, captured
            work()
            is_replaying = False

        return replay

    found = obstacle(Changed(model, change), capture)
    assert found == "a graph of 4 tokens computes other logits than its own code"


def test_code_that_cannot_be_captured(obstacle: Outcome, model: Model) -> None:
    def fail(batch: ModelInput) -> ModelInput:
        raise RuntimeError("called a synchronizing CUDA operation\nand more")

    found = obstacle(Changed(model, fail), exact)
    assert found is not None
    assert "called a synchronizing CUDA operation" in found
    assert "\n" not in found


@pytest.mark.parametrize("error", [InvariantError("ours"), torch.OutOfMemoryError("none left")])
def test_errors_that_say_nothing_about_the_code(
    obstacle: Outcome, model: Model, error: Exception
) -> None:
    def fail(batch: ModelInput) -> ModelInput:
        raise error

    with pytest.raises(type(error)):
        obstacle(Changed(model, fail), exact)


def test_nothing_is_captured_on_a_cpu(model: Model) -> None:
    assert not model.is_capturable
