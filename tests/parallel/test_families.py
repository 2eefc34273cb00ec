"""Every family, split over ranks: logits equal those of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.cases import EVERY_CASE
from tests.models.serving import StepKV, loaded_weights, served_logits
from tests.parallel.threads import ThreadCollectives, in_ranks

from aquifer.errors import ConfigError
from aquifer.models import plan_model
from aquifer.models.collectives import ALONE, Collectives
from aquifer.parallel.plan import sharding
from aquifer.weights.checkpoint import Checkpoint

WHOLE = {
    "gpt2-other": (2, "attention heads: 3"),
    "qwen3_next": (4, "key heads of linear attention: 2"),
    "qwen3_next-dense": (2, "key heads of linear attention: 3"),
}
"""Architectures that cannot be split over so many ranks or more, and why."""

CASES = [
    (name, size)
    for number, name in enumerate(OUR_DECODER | HYBRIDS)
    for size in (2, 4)
    if size < WHOLE.get(name, (8, ""))[0]
    and (EVERY_CASE or name in WHOLE or size == (2, 4)[number % 2])
]
"""Each in one size, or in both."""


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_equal_those_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    save_tiny((OUR_DECODER | HYBRIDS)[name](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in (1, 9, 13)]

    def logits_of(collectives: Collectives) -> list[torch.Tensor]:
        plan = plan_model(checkpoint)
        if collectives.size > 1:
            plan = sharding(plan_model, collectives)(checkpoint, None)
        with loaded_weights(checkpoint, plan) as tensors, torch.inference_mode():
            model = plan.build(tensors)
            return served_logits(model, sequences, StepKV, plan.state_layout())

    expected = logits_of(ALONE)
    of_ranks = in_ranks(size, logits_of)
    for logits, *parts in zip(expected, *of_ranks, strict=True):
        assert len({part.shape for part in parts}) == 1
        joined, padding = torch.cat(parts, 1).tensor_split([logits.shape[1]], 1)
        torch.testing.assert_close(joined, logits, atol=2e-4, rtol=2e-4)
        assert not padding.any()


@pytest.mark.parametrize(("name", "size"), CASES[::4])
def test_ranks_have_equal_shapes_and_all_of_the_model(name: str, size: int, tmp_path: Path) -> None:
    save_tiny((OUR_DECODER | HYBRIDS)[name](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    whole = plan_model(checkpoint)
    plans = in_ranks(size, lambda ranks: sharding(plan_model, ranks)(checkpoint, None))
    assert len({plan.kv_layout for plan in plans}) == 1
    assert len({plan.state_layout() for plan in plans}) == 1
    assert 1.5 * plans[0].kv_layout.token_bytes <= 2 * whole.kv_layout.token_bytes
    split_bytes = 0
    for parameter, *own in zip(whole.parameters, *(p.parameters for p in plans), strict=True):
        assert len({each.shape for each in own}) == 1
        shards = [each.shard for each in own if each.shard is not None]
        if len(shards) < size:
            continue
        split_bytes += own[0].num_bytes
        indices = {i for s in shards for start, stop in s.ranges for i in range(start, stop)}
        assert indices == set(range(parameter.shape[shards[0].dim])), parameter.name
    whole_bytes = sum(parameter.num_bytes for parameter in whole.parameters)
    own_bytes = sum(parameter.num_bytes for parameter in plans[0].parameters)
    assert split_bytes > 0.6 * own_bytes
    assert own_bytes < 0.7 * whole_bytes


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_is_refused(name: str, tmp_path: Path) -> None:
    save_tiny((OUR_DECODER | HYBRIDS)[name](), tmp_path)
    size, reason = WHOLE[name]
    sizes = "1, 2" if size == 4 else "1"
    refused = f"cannot be split over {size} devices: {reason}; .*-size that works: {sizes}$"
    with pytest.raises(ConfigError, match=refused):
        _plan(tmp_path, size)


def test_sizes_that_work_are_named(tmp_path: Path) -> None:
    save_tiny(OUR_DECODER["llama"](), tmp_path)
    with pytest.raises(ConfigError, match=r"attention heads: 4; .*-size that works: 1, 2, 4$"):
        _plan(tmp_path, 3)


def test_other_implementations_are_refused(tmp_path: Path) -> None:
    save_tiny(OUR_DECODER["llama"](), tmp_path)
    ranks = in_ranks(2, lambda ranks: ranks)
    from aquifer.models.transformers import TransformersPlan

    with pytest.raises(ConfigError, match="not computed by Aquifer's own decoder"):
        sharding(TransformersPlan, ranks[0])(Checkpoint.open(tmp_path), None)


def _plan(folder: Path, size: int) -> None:
    ranks: list[ThreadCollectives] = in_ranks(size, lambda ranks: ranks)
    sharding(plan_model, ranks[0])(Checkpoint.open(folder), None)
