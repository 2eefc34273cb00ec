"""The tiny models of the engine's tests give the logits of their references, however batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.dense_kv import DenseKV
from tests.models.serving import StepKV, loaded_model, served_logits
from tests.models.tiny import TINY_MODELS, plan_tiny

from aquifer.weights.checkpoint import Checkpoint

NUM_KV_LAYERS = {
    "llama": 2,
    "llama-tied": 3,
    "no-kv": 0,
    "sparse-kv": 2,
    "recurrent": 2,
    "windows": 3,
    "sliding": 2,
}


def random_ids(length: int, seed: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make_kv", [StepKV, DenseKV])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_the_reference(name: str, make_kv: type, tmp_path: Path) -> None:
    """In one batch, chunks of several sequences; then one token of each at a time."""
    tiny = TINY_MODELS[name]
    checkpoint = Checkpoint.open(tiny.save(tmp_path / name))
    state_layout = plan_tiny(checkpoint).state_layout()
    with loaded_model(checkpoint, plan_tiny) as model:
        sequences = [random_ids(n, seed, model.vocab_size) for seed, n in enumerate((17, 4, 40))]
        served = served_logits(model, sequences, make_kv, state_layout)
    for ids, actual in zip(sequences, served, strict=True):
        expected = tiny.forward_all(ids.tolist())
        assert expected.std() > 0.2  # the comparison means nothing if all logits are alike
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_plan_from_the_configuration_alone(name: str, tmp_path: Path) -> None:
    tiny = TINY_MODELS[name]
    folder = tiny.save(tmp_path / name)
    (folder / "model.safetensors").unlink()
    plan = plan_tiny(Checkpoint.without_tensors(folder))
    assert plan.vocab_size == tiny.config["vocab_size"] <= 64
    assert plan.max_model_len == tiny.config["max_position_embeddings"] <= 128
    assert plan.num_parameters == sum(tensor.numel() for tensor in tiny.weights.values())
    assert (plan.state_layout() is None) == (name != "recurrent")
    layout = plan.kv_layout
    assert len(layout.layers) == NUM_KV_LAYERS[name]
    assert (layout.token_bytes == 0) == (name == "no-kv")
    assert plan_tiny(Checkpoint.without_tensors(folder), torch.bfloat16).kv_layout.token_bytes == (
        layout.token_bytes // 2
    )


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_depend_on_earlier_tokens_only_with_kv(name: str) -> None:
    first, second = (TINY_MODELS[name].forward_all([start, 7, 9])[-1] for start in (1, 2))
    assert torch.equal(first, second) == (name == "no-kv")


@pytest.mark.parametrize("name", ["no-kv", "sparse-kv"])
def test_logits_depend_on_the_position(name: str) -> None:
    first, second = TINY_MODELS[name].forward_all([5, 5])
    assert (first - second).abs().max() > 0.1
