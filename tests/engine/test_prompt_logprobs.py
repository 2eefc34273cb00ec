"""Log probabilities of prompts, for which logits are made in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.life import Open
from tests.models.tiny import TINY_MODELS
from tests.models.wrapped import WrappedModel, plan_wrapped

from aquifer.engine.params import Request, SamplingParams
from aquifer.models import Model

MAX_SEQS = 3


class Watched(WrappedModel):
    """A model that notes of how many rows it was asked for logits."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.num_rows: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(hidden))
        return super().logits(hidden)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 9])
def test_no_more_rows_than_are_sampled_at_once(
    open_world: Open, max_num_batched_tokens: int
) -> None:
    """Whatever the length of a prompt, or of the chunk that is read of it."""
    models: list[Watched] = []

    def watch(model: Model) -> Model:
        models.append(Watched(model))
        return models[-1]

    world = open_world(
        models={"a": "llama"},
        planner=plan_wrapped(watch),
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    generator = np.random.default_rng(0)
    prompts = [generator.integers(64, size=length).tolist() for length in (1, 5, 23, 60)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=2, prompt_logprobs=4)
        world.engine.add(Request(str(number), "a", prompt, params, 0.0))
    reports = {}
    while world.engine.has_work:
        for output in world.engine.step():
            if output.prompt_logprobs is not None:
                reports[int(output.request_id)] = output.prompt_logprobs
    (model,) = models
    assert max(model.num_rows) == MAX_SEQS + 1
    for number, prompt in enumerate(prompts):
        first, *others = reports[number]
        assert first is None
        expected = TINY_MODELS["llama"].forward_all(prompt).log_softmax(-1)
        assert len(others) == len(prompt) - 1
        for row, token, report in zip(expected[:-1], prompt[1:], others, strict=True):
            best = row.topk(4)
            assert report is not None
            assert report.token_ids == [token, *best.indices.tolist()]
            np.testing.assert_allclose(
                report.logprobs, [float(row[token]), *best.values.tolist()], atol=1e-4
            )
