"""Heads that are tied to the embedding: the stored tensors count more than the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import HYBRIDS, OUR_DECODER, TRANSFORMERS, VOCAB_SIZE, save_tiny
from tests.models.serving import loaded_weights, served_logits

from aquifer.models import plan_model
from aquifer.weights.checkpoint import Checkpoint, are_equal

EMBEDS = {
    "llama": "model.embed_tokens.weight",
    "gpt_neox": "gpt_neox.embed_in.weight",  # its head has another name than most
    "falcon_h1": "model.embed_tokens.weight",  # embedding and head have factors
    "helium": "model.embed_tokens.weight",  # computed by Transformers
}
HEADS = {"gpt_neox": "embed_out.weight"}


@pytest.mark.parametrize("stored", ["another", "equal", "alone"])
@pytest.mark.parametrize("name", EMBEDS)
def test_head_that_is_stored_although_it_is_tied(name: str, stored: str, tmp_path: Path) -> None:
    config = (OUR_DECODER | HYBRIDS | TRANSFORMERS)[name]()
    config.tie_word_embeddings = True
    save_tiny(config, tmp_path)
    file, embed, head = tmp_path / "model.safetensors", EMBEDS[name], HEADS.get(name)
    tensors = load_file(file)
    own = torch.randn_like(tensors[embed]) if stored == "another" else tensors[embed].clone()
    tensors[head or "lm_head.weight"] = own
    if stored == "alone":
        del tensors[embed]
    save_file(tensors, file)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None], use_cache=False).logits[0]
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint)
    num_heads = sum(each.shape == tuple(own.shape) for each in plan.parameters)
    assert num_heads == (2 if stored == "another" else 1)
    with loaded_weights(checkpoint, plan) as weights:
        (ours,) = served_logits(plan.build(weights), [ids], state_layout=plan.state_layout())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", [0, -1])
def test_one_number_that_differs_is_found(changed: int, tmp_path: Path) -> None:
    """In tensors that are longer than what is compared at once."""
    first = torch.zeros((5 << 20) + 3)
    second = first.clone()
    second[changed] = 1.0
    save_file(
        {"first": first, "second": second, "same": first.clone()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    tensors = Checkpoint.open(tmp_path).tensors
    assert are_equal(tensors["first"], tensors["same"])
    assert not are_equal(tensors["first"], tensors["second"])
    assert not are_equal(tensors["first"], replace(tensors["same"], dtype=torch.int32))
