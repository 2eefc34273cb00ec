"""Models of Transformers served over our KV, compared with their own forward; refusals."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import (
    BOTH,
    GQA,
    MAX_TOKENS,
    ORIGINAL_TOKENS,
    TRANSFORMERS,
    VOCAB_SIZE,
    WINDOW_TOKENS,
    save_tiny,
)
from tests.models.serving import loaded_model, loaded_weights, served_logits

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.models.base import Model
from aquifer.models.transformers import TransformersPlan
from aquifer.weights.checkpoint import Checkpoint

ARCHITECTURES = TRANSFORMERS | BOTH
LENGTHS = (17, 4, 11)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, Transformers' own model) of each architecture."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny(ARCHITECTURES[request.param](), folder)


def loaded(folder: Path, dtype: torch.dtype | None = None) -> AbstractContextManager[Model]:
    return loaded_model(Checkpoint.open(folder), TransformersPlan, dtype)


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def own_logits(model: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(ids[None], use_cache=False).logits[0] for ids in sequences]


def assert_same_logits(model: Model, reference: Any) -> None:
    sequences = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = own_logits(reference, sequences)
    actual = served_logits(model, sequences)
    for ours, theirs in zip(actual, expected, strict=True):
        assert theirs.std() > 0.05  # the comparison means nothing if all logits are alike
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_logits_equal_transformers(saved: Any) -> None:
    folder, reference = saved
    with loaded(folder) as model:
        assert model.vocab_size == VOCAB_SIZE
        assert model.kv_layout.dtype == torch.float32
        assert_same_logits(model, reference)


def test_rounding_in_16_bits_is_not_refused(saved: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with loaded(saved[0], dtype) as model:
            assert model.kv_layout.dtype == dtype


def test_planning_reads_no_weights_and_takes_no_memory_for_them(saved: Any) -> None:
    folder, reference = saved
    plan = TransformersPlan(Checkpoint.open(folder), None)
    sizes = {name: tensor.numel() for name, tensor in reference.named_parameters()}
    buffers = dict(reference.named_buffers())
    for parameter in plan.parameters:
        numel = sizes.pop(parameter.name, None) or buffers[parameter.name].numel()
        assert parameter.num_bytes == 4 * numel
    assert not sizes  # every parameter once, tied ones under one name


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"])
def test_windows_matter(name: str, tmp_path: Path) -> None:
    """Without its window, each of these gives other logits, so the tests above can fail."""
    config = ARCHITECTURES[name]()
    reference = save_tiny(config, tmp_path)
    ids = random_ids(LENGTHS[0], 0)
    windowed = own_logits(reference, [ids])[0]
    (tmp_path / "config.json").write_text(
        json.dumps(
            json.loads((tmp_path / "config.json").read_text())
            | {"sliding_window": MAX_TOKENS, "layer_types": getattr(config, "layer_types", None)}
        )
    )
    with loaded(tmp_path) as model:
        ours = served_logits(model, [ids])[0]
    torch.testing.assert_close(ours[:WINDOW_TOKENS], windowed[:WINDOW_TOKENS], rtol=1e-4, atol=1e-4)
    assert (ours[-1] - windowed[-1]).abs().max() > 1e-2


def test_half_precision_and_dtype_choice(tmp_path: Path) -> None:
    reference = save_tiny(ARCHITECTURES["qwen3_moe"](), tmp_path)
    with loaded(tmp_path, torch.bfloat16) as model:
        assert model.kv_layout.dtype == torch.bfloat16
        ids = random_ids(8, 0)
        ours = served_logits(model, [ids])[0]
        assert ours.dtype == torch.bfloat16
        # The median, because rounding may send a token to another expert.
        assert torch.cosine_similarity(ours, own_logits(reference, [ids])[0]).median() > 0.99
    edit_config(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in TransformersPlan(Checkpoint.open(tmp_path), None).parameters} == {
        torch.bfloat16
    }
    edit_config(tmp_path, dtype=None)
    assert {p.dtype for p in TransformersPlan(Checkpoint.open(tmp_path), None).parameters} == {
        torch.float32
    }


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rename_tensors(folder: Path, rename: Any, **extra: torch.Tensor) -> None:
    """Rewrite the tensors of a checkpoint; `rename` gives (new name, tensor) pairs for each."""
    file = folder / "model.safetensors"
    tensors = dict(pair for item in load_file(file).items() for pair in rename(*item))
    save_file({name: tensor.contiguous() for name, tensor in (tensors | extra).items()}, file)


def test_gpt2_without_prefix_and_with_old_masks(tmp_path: Path) -> None:
    """The hub's gpt2: names of the base model, and masks that are no longer parameters."""
    reference = save_tiny(ARCHITECTURES["gpt2"](), tmp_path)
    rename_tensors(
        tmp_path,
        lambda name, tensor: [(name.removeprefix("transformer."), tensor)],
        **{
            "h.0.attn.bias": torch.ones(1, 1, MAX_TOKENS, MAX_TOKENS),
            "h.0.attn.masked_bias": torch.ones(()),
        },
    )
    assert "wte.weight" in Checkpoint.open(tmp_path).tensors
    with loaded(tmp_path) as model:
        assert_same_logits(model, reference)


def test_tied_head_under_its_other_name(tmp_path: Path) -> None:
    reference = save_tiny(ARCHITECTURES["gpt2"](), tmp_path)
    other_names = {"transformer.wte.weight": "lm_head.weight"}
    rename_tensors(tmp_path, lambda name, tensor: [(other_names.get(name, name), tensor)])
    with loaded(tmp_path) as model:
        assert_same_logits(model, reference)


def mixtral_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return split_experts(name, tensor, ("w1", "w3"), "w2")


def qwen_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return split_experts(name, tensor, ("gate_proj", "up_proj"), "down_proj")


def split_experts(
    name: str, tensor: torch.Tensor, gate_up: tuple[str, str], down: str
) -> list[tuple[str, torch.Tensor]]:
    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        return [
            (f"{stem}.{expert}.{part}.weight", matrix)
            for expert, both in enumerate(tensor)
            for part, matrix in zip(gate_up, both.chunk(2), strict=True)
        ]
    if leaf == "down_proj":
        return [(f"{stem}.{e}.{down}.weight", matrix) for e, matrix in enumerate(tensor)]
    return [(name, tensor)]


@pytest.mark.parametrize(
    ("name", "split", "stored"),
    [
        ("mixtral", mixtral_experts, "model.layers.1.block_sparse_moe.experts.10.w3.weight"),
        ("qwen3_moe", qwen_experts, "model.layers.1.mlp.experts.10.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_experts_stored_singly_or_fused(
    name: str, split: Any, stored: str, layout: str, tmp_path: Path
) -> None:
    """Twelve experts, because alphabetical order puts 10 before 2."""
    config = ARCHITECTURES[name]()
    setattr(config, "num_local_experts" if name == "mixtral" else "num_experts", 12)
    reference = save_tiny(config, tmp_path)
    state = reference.state_dict()
    if layout == "hub":
        state = dict(pair for item in state.items() for pair in split(*item))
    save_file({key: t.contiguous() for key, t in state.items()}, tmp_path / "model.safetensors")
    assert (stored in Checkpoint.open(tmp_path).tensors) == (layout == "hub")
    with loaded(tmp_path) as model:
        assert_same_logits(model, reference)


def test_contexts_end_where_rotary_scaling_would_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(ARCHITECTURES["phi3-longrope"](), tmp_path)
    plan = TransformersPlan(Checkpoint.open(tmp_path), None)
    assert plan.max_model_len == ORIGINAL_TOKENS
    assert f"{ORIGINAL_TOKENS} of {MAX_TOKENS}" in caplog.text


def test_invalid_configuration_is_not_reported_as_unsupported(tmp_path: Path) -> None:
    save_tiny(ARCHITECTURES["olmo2"](), tmp_path)
    edit_config(tmp_path, attention_dropout="high")
    with pytest.raises(
        ConfigError, match=r"config\.json is not a valid olmo2 configuration: .*'attention_dropout'"
    ) as caught:
        TransformersPlan(Checkpoint.open(tmp_path), None)
    assert not isinstance(caught.value, UnsupportedModelError)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny(ARCHITECTURES["olmo2"](), tmp_path)
    rename_tensors(
        tmp_path, lambda name, tensor: [] if name == "lm_head.weight" else [(name, tensor)]
    )
    with pytest.raises(ConfigError, match=r"lacks the tensor 'lm_head\.weight'"):
        TransformersPlan(Checkpoint.open(tmp_path), None)


def test_missing_expert_is_noticed(tmp_path: Path) -> None:
    reference = save_tiny(ARCHITECTURES["mixtral"](), tmp_path)
    state = dict(pair for item in reference.state_dict().items() for pair in mixtral_experts(*item))
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file({key: t.contiguous() for key, t in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        TransformersPlan(Checkpoint.open(tmp_path), None)


_SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "T5ForConditionalGeneration": ({"model_type": "t5", "d_model": 32}, "encoder-decoder"),
    "BartForConditionalGeneration": ({"model_type": "bart", "d_model": 32}, "encoder-decoder"),
    "BertForMaskedLM": (
        {"model_type": "bert", "num_attention_heads": 4, **_SMALL},
        "not causal",
    ),
    "MambaForCausalLM": ({"model_type": "mamba", **_SMALL}, "recurrent state"),
    "JambaForCausalLM": ({"model_type": "jamba", **_SMALL}, "recurrent state"),
    "FalconH1ForCausalLM": ({"model_type": "falcon_h1", **_SMALL}, "recurrent state"),
    "RwkvForCausalLM": ({"model_type": "rwkv", **_SMALL}, "recurrent state"),
    "Lfm2ForCausalLM": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], **_SMALL},
        "layers of type conv",
    ),
    "BloomForCausalLM": ({"model_type": "bloom", "n_head": 4, **_SMALL}, "ALiBi"),
    "MptForCausalLM": ({"model_type": "mpt", "d_model": 32}, "ALiBi"),
    "FalconForCausalLM": ({"model_type": "falcon", "alibi": True, **_SMALL}, "ALiBi"),
    "GPTJForCausalLM": ({"model_type": "gptj"}, "does not let attention be replaced"),
    "GptOssForCausalLM": (
        {"model_type": "gpt_oss", "num_local_experts": 2, "intermediate_size": 32, **_SMALL},
        "attention sinks",
    ),
    "Llama4ForCausalLM": ({"model_type": "llama4_text"}, "attn_temperature_tuning"),
    "Gemma3ForConditionalGeneration": ({"model_type": "gemma3"}, "multimodal"),
    "AcmeForCausalLM": ({"model_type": "acme"}, "does not know 'acme'"),
    "CustomForCausalLM": (
        {"model_type": "custom", "auto_map": {"AutoModelForCausalLM": "m.CustomForCausalLM"}},
        "code that comes with a checkpoint is never run",
    ),
    "OlmoForCausalLM": (
        {"model_type": "olmo", "quantization_config": {"quant_method": "gptq"}, **_SMALL},
        "quantised",
    ),
}


@pytest.mark.parametrize("architecture", _REFUSED)
def test_refused_before_weights_are_read(architecture: str, tmp_path: Path) -> None:
    config, reason = _REFUSED[architecture]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    save_file({"some.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        TransformersPlan(Checkpoint.open(tmp_path), None)
    assert caught.value.architecture == architecture
    assert str(caught.value).startswith(f"cannot serve {architecture}: ")


def test_bidirectional_mask_is_refused_by_the_probe(tmp_path: Path) -> None:
    save_tiny(ARCHITECTURES["gemma3_text"](), tmp_path)
    edit_config(tmp_path, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match=r"mask|causal"), loaded(tmp_path):
        pass


def test_chunked_attention_is_refused_unless_one_chunk_holds_the_context(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        **GQA,
        intermediate_size_mlp=96,
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=16,
        attn_temperature_tuning=False,
        layer_types=["chunked_attention"] * 3,
    )
    reference = save_tiny(config, tmp_path)
    with (
        pytest.raises(UnsupportedModelError, match="neither causal nor a sliding"),
        loaded(tmp_path),
    ):
        pass
    edit_config(tmp_path, attention_chunk_size=MAX_TOKENS)
    reference.config.attention_chunk_size = MAX_TOKENS
    with loaded(tmp_path) as model:
        assert_same_logits(model, reference)


def test_two_models_from_one_plan_do_not_share_state(tmp_path: Path) -> None:
    save_tiny(ARCHITECTURES["olmo2"](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    plan = TransformersPlan(checkpoint, None)
    with loaded_weights(checkpoint, plan) as tensors:
        first = plan.build(tensors)
        plan.build({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        ids = random_ids(6, 0)
        assert served_logits(first, [ids])[0].abs().max() > 0


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (LayerKV(4, 16, 16), torch.float32, "layer 0 has KV of"),
        (LayerKV(2, 16, 8), torch.float32, "layer 0 has KV of"),
        (LayerKV(2, 16, 16), torch.bfloat16, "not all of torch.bfloat16"),
    ],
)
def test_layout_other_than_planned_is_refused(
    layer: LayerKV, dtype: torch.dtype, reason: str, tmp_path: Path
) -> None:
    save_tiny(ARCHITECTURES["olmo2"](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    plan = TransformersPlan(checkpoint, None)
    planned = plan.kv_layout
    assert planned.layers[0] == LayerKV(2, 16, 16)
    with loaded_weights(checkpoint, plan) as tensors:
        plan.kv_layout = KVLayout((layer, *planned.layers[1:]), dtype)
        with pytest.raises(UnsupportedModelError, match=reason):
            plan.build(tensors)
        plan.kv_layout = KVLayout(planned.layers[1:], planned.dtype)
        with pytest.raises(UnsupportedModelError, match="layer 2 computed attention"):
            plan.build(tensors)
        plan.kv_layout = KVLayout((*planned.layers, planned.layers[0]), planned.dtype)
        with pytest.raises(UnsupportedModelError, match="3 times in 4 layers"):
            plan.build(tensors)
        plan.kv_layout = planned
        plan.build(tensors)
