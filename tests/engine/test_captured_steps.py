"""Captured steps on the CPU: Triton's kernels interpreted, and graphs that call again what was
captured. Not those in pieces, which have to be real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.architectures import OUR_DECODER, save_tiny
from tests.kernels.interpreter import interpret

from aquifer.cache.spans import IntArray
from aquifer.engine import captured as captured_module
from aquifer.engine import model_host, whole_graphs
from aquifer.engine.captured import CapturedSteps
from aquifer.engine.graphs import ChunkStep
from aquifer.engine.params import SamplingParams
from aquifer.engine.runner import Runner
from aquifer.engine.whole_graphs import WholeGraphs
from aquifer.llm import LLM

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # in the interpreter

MAX_SEQS, MAX_TOKENS = 4, 40


class Repetition:
    """In place of a graph: repeats the launches."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class RepetitionPool:
    """In place of `GraphPool`."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def capture(self, work: Callable[[], None]) -> Repetition:
        work()
        return Repetition(work)


class CapturingRunner(Runner):
    """A runner that can capture on a CPU, when it is asked to."""

    made: ClassVar[list[CapturingRunner]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)

    def capture(self, hidden_size: int) -> CapturedSteps:
        """Capture all steps but those in pieces, and use them from now on."""
        self._buffers.make_hidden(torch.zeros(1, hidden_size))
        captured = CapturedSteps(
            self._steps_of(self._model),
            self._steps_of(self._model.rehearsal()),
            self._sample,
            self._kv.view,
            self._buffers,
            MAX_SEQS,
            MAX_TOKENS,
            torch.device("cpu"),
            has_state=False,
        )
        captured.rehearse(0.0, lambda *_: None)
        captured.capture(0.0, lambda *_: None)
        self._captured = captured
        return captured

    def forget(self) -> None:
        """Run steps kernel by kernel."""
        self._captured = None


@pytest.fixture(autouse=True)
def repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted, and graphs repeat the launches."""
    interpret(monkeypatch)
    monkeypatch.setattr(captured_module, "GraphPool", RepetitionPool)
    monkeypatch.setattr(CapturedSteps, "_in_pieces", lambda *_: [])
    monkeypatch.setattr(model_host, "Runner", CapturingRunner)
    monkeypatch.setattr(CapturingRunner, "made", [])

    def copy(target: torch.Tensor, array: IntArray) -> None:
        target.copy_(torch.from_numpy(array))

    monkeypatch.setattr(whole_graphs, "upload_into", copy)


@contextmanager
def open_llm(
    architecture: str, folder: Path, kv_cache: str = "virtual"
) -> Iterator[tuple[LLM, CapturingRunner, CapturedSteps]]:
    """An engine, its runner, and the steps that this has captured."""
    config = OUR_DECODER[architecture]()
    save_tiny(config, folder, 2)
    with LLM(
        folder,
        device="cpu",
        memory="64MiB",
        kv_cache=kv_cache,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=False,
    ) as llm:
        (runner,) = CapturingRunner.made
        yield llm, runner, runner.capture(config.hidden_size)


@pytest.mark.parametrize(
    ("architecture", "kv_cache"),
    [("llama", "virtual"), ("gemma2", "paged"), ("deepseek_v2", "virtual")],
)
def test_tokens_are_those_of_steps_that_are_not_captured(
    architecture: str, kv_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths, cut into chunks, beside sequences that decode."""
    random = np.random.default_rng(0)
    prompts = [random.integers(150, size=n).tolist() for n in (3, 33, 41, 1)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 2, 2, 2)]
    steps: list[ChunkStep] = []
    run = WholeGraphs.run

    def noted(self: WholeGraphs, size: int, step: ChunkStep) -> None:
        steps.append(step)
        run(self, size, step)

    monkeypatch.setattr(WholeGraphs, "run", noted)
    with open_llm(architecture, tmp_path, kv_cache) as (llm, runner, _):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runner.forget()
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert any(step.num_decodes and step.spans.starts[step.num_decodes :].any() for step in steps)
    for ours, other in zip(outputs, expected, strict=True):
        assert ours.outputs[0].token_ids == other.outputs[0].token_ids


def test_graphs_that_are_slower_than_larger_ones_are_dropped(tmp_path: Path) -> None:
    # Of 40 tokens, of 32, both again, of 16, which was disturbed, and this one and 40 again.
    seconds = iter((1.0, 1.5, 1.4, 1.1, 1.5, 0.9, 1.0))

    def seconds_of(work: Callable[[], None]) -> float:
        work()
        return next(seconds)

    with open_llm("llama", tmp_path) as (_, _, captured):
        before = captured.chunk_sizes
        captured.keep_fast(seconds_of)
        assert [before, captured.chunk_sizes] == [(16, 32, 40), (16, 40)]
    assert next(seconds, None) is None
