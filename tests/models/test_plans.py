"""Values that a plan takes from the configuration alone, for every architecture."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import (
    GQA,
    HYBRIDS,
    MAX_TOKENS,
    ORIGINAL_TOKENS,
    OUR_DECODER,
    TRANSFORMERS,
    VOCAB_SIZE,
    WINDOW_TOKENS,
    save_tiny,
)
from tests.models.serving import loaded_weights, served_logits
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aquifer.cache.base import KVLayout, LayerKV, StateLayout, StateTensor
from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models import Planner, plan_model
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.models.families import FAMILIES
from aquifer.models.rope import RotaryAngles
from aquifer.models.transformers.layout import read_kv_layout
from aquifer.weights.checkpoint import Checkpoint

ARCHITECTURES = OUR_DECODER | TRANSFORMERS
OTHER_KV = {
    **{
        name: LayerKV(1, 32, 24, is_latent=True)  # Transformers caches both parts apart
        for name in ("deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "deepseek_v3-plain")
    },
    "deepseek_v3-biases": LayerKV(4, 24, 12),  # expanded from what Transformers caches
    "falcon": LayerKV(2, 16, 16),  # Transformers caches a copy of them for each query head
    "falcon-one-norm": LayerKV(2, 16, 16),
}
"""KV of layers that is not what Transformers caches."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plan_agrees_with_a_run_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny(ARCHITECTURES[name](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    whole = plan_model(checkpoint)
    (tmp_path / "model.safetensors").unlink()
    plan = plan_model(Checkpoint.without_tensors(tmp_path))
    with torch.no_grad():
        output = reference(torch.arange(4)[None], use_cache=True)
    layers = tuple(
        OTHER_KV.get(name)
        or LayerKV(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in output.past_key_values.layers
    )
    if name in OUR_DECODER:
        windows = [getattr(kept, "sliding_window", None) for kept in output.past_key_values.layers]
        layers = tuple(
            replace(layer, window_tokens=window)
            for layer, window in zip(layers, windows, strict=True)
        )
    assert plan.kv_layout == KVLayout(layers, torch.float32)
    assert plan.vocab_size == output.logits.shape[-1]
    tensors = dict(reference.named_parameters())
    if name in OUR_DECODER:  # the bias of routers is a buffer in Transformers
        tensors |= {key: b for key, b in reference.named_buffers() if key in checkpoint.tensors}
    assert plan.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert 0 < plan.max_model_len <= MAX_TOKENS
    assert plan.state_layout() is None
    for field in ("kv_layout", "vocab_size", "max_model_len"):
        assert getattr(whole, field) == getattr(plan, field)
    # A checkpoint may also store buffers, which otherwise have their initial values.
    stored = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    assert whole.num_parameters == stored


def test_windows_of_mistral_models() -> None:
    """Every layer has the window, unless the configuration lists the types of its layers."""
    values = {"model_type": "mistral", **GQA, "sliding_window": WINDOW_TOKENS}
    types = ["full_attention", "sliding_attention", "full_attention"]
    table: list[tuple[dict[str, Any], tuple[int | None, ...]]] = [
        ({}, (WINDOW_TOKENS,) * 3),
        ({"layer_types": types}, (None, WINDOW_TOKENS, None)),
        ({"sliding_window": None}, (None,) * 3),
    ]
    for extra, windows in table:
        fields = Fields(Path("config.json"), values | extra)
        spec = FAMILIES["mistral"](fields, "Mistral")
        assert tuple(layer.window_tokens for layer in spec.layers) == windows


def test_gpt_oss_without_settings_of_the_rotary_embedding() -> None:
    """The defaults of the model type: YaRN, from 4096 to 131072 tokens."""
    config = transformers.GptOssConfig(num_hidden_layers=3)
    values = {name: value for name, value in config.to_dict().items() if "rope" not in name}
    spec = FAMILIES["gpt_oss"](Fields(Path("config.json"), values), "GptOss")
    assert spec.max_model_len == 131072
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert torch.equal(spec.ropes[0].frequencies, frequencies)
    assert spec.ropes[0].magnitude == magnitude
    assert [layer.window_tokens for layer in spec.layers] == [128, None, 128]


def test_settings_of_the_rotary_embedding_that_were_added() -> None:
    """As users do to what Transformers 5 has saved; also with the original length beside them."""
    values = transformers.Qwen3Config(num_hidden_layers=1).to_dict()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    apart = {name: value for name, value in yarn.items() if "original" not in name}
    specs = [
        FAMILIES["qwen3"](Fields(Path("config.json"), values | changes), "Qwen3")
        for changes in (
            {"rope_parameters": yarn | {"rope_theta": 10_000.0}},
            {"rope_scaling": yarn},
            {"rope_scaling": apart, "original_max_position_embeddings": 1024},
        )
    ]
    assert [spec.max_model_len for spec in specs] == [4096] * 3
    for spec in specs[1:]:
        assert torch.equal(spec.ropes[0].frequencies, specs[0].ropes[0].frequencies)


@pytest.mark.parametrize("name", ["cohere", "cohere2", "mixtral", "olmo3", "smollm3", "llama"])
def test_the_default_base_of_the_rotary_embedding(name: str) -> None:
    kind = type(transformers.AutoConfig.for_model(name))
    values = {name: value for name, value in kind().to_dict().items() if "rope" not in name}
    spec = FAMILIES[name](Fields(Path("config.json"), values), name)
    assert spec.ropes[0].theta == kind.default_theta


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"use_sliding_window": False, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"attention_bias": False, "mlp_bias": True}),
        ("qwen3", {"mlp_bias": True}),
    ],
)
def test_entries_that_a_model_type_does_not_read(name: str, changes: dict[str, Any]) -> None:
    values = transformers.AutoConfig.for_model(name, num_hidden_layers=2).to_dict()
    plain, changed = (
        FAMILIES[name](Fields(Path("config.json"), each), name)
        for each in (values, values | changes)
    )
    assert (changed.attention, changed.mlp, changed.layers) == (
        plain.attention,
        plain.mlp,
        plain.layers,
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("smollm3", {"use_sliding_window": False}),  # the types of its layers are given
        ("gemma3_text", {"attn_logit_softcapping": 0.5}),
        ("deepseek_v2", {"mlp_bias": True}),
        ("deepseek_v3", {"rope_interleave": None}),
        ("deepseek_v3", {"norm_topk_prob": None}),
        ("falcon_h1-gate-first", {"mamba_norm_before_gate": None}),
        ("phi3-longrope", {"original_max_position_embeddings": 64}),  # not that of the settings
        ("phi3-longrope", {"original_max_position_embeddings": None}),
    ],
)
def test_entries_are_read_as_transformers_does(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Entries of a file that the configuration classes would write otherwise."""
    values = json.loads((OUR_DECODER | HYBRIDS)[name]().to_json_string(use_diff=False)) | changes
    if name == "phi3-longrope" and None in changes.values():
        del values["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference = save_tiny(transformers.AutoConfig.from_pretrained(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    ids = torch.randint(3, VOCAB_SIZE, (11,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None], use_cache=False).logits[0]
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint)
    with loaded_weights(checkpoint, plan) as weights:
        (ours,) = served_logits(plan.build(weights), [ids], state_layout=plan.state_layout())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_factor_of_longrope() -> None:
    config = OUR_DECODER["phi3-longrope"]()
    config.rope_parameters["factor"] = 9.0  # in place of the lengths' ratio
    spec = FAMILIES["phi3"](Fields(Path("config.json"), config.to_dict()), "Phi3")
    _, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    assert spec.ropes[0].magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("zamba2", {"hybrid_layer_ids": [3, 2, 1]}, "hybrid_layer_ids is a list; it must be .1, 2"),
        ("falcon_h1-norm", {"lm_head_multiplier": 0.0}, "lm_head_multiplier is 0.0; it must be"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention is not causal"),
        ("mamba2", {"hidden_act": "relu"}, "hidden_act 'relu' is not silu.* recurrent state"),
    ],
)
def test_entries_that_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """With the reason of our decoder, also where Transformers is asked next."""
    values = json.loads((OUR_DECODER | HYBRIDS)[name]().to_json_string(use_diff=False)) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        plan_model(Checkpoint.without_tensors(tmp_path))


@pytest.mark.parametrize("field", ["swiglu_alpha", "swiglu_limit"])
def test_gpt_oss_with_another_activation(field: str) -> None:
    values = OUR_DECODER["gpt_oss"]().to_dict() | {field: 2.0}
    with pytest.raises(UnsupportedModelError, match="swiglu"):
        FAMILIES["gpt_oss"](Fields(Path("config.json"), values), "GptOss")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mpt", "alibi", False),
        ("mpt", "alibi_bias_max", 16),
        ("mpt", "attn_type", "multiquery_attention"),
        ("mpt", "clip_qkv", 6.0),
        ("mpt", "prefix_lm", True),
        ("mpt", "qk_ln", True),
        ("mpt", "expansion_ratio", 2),
        ("mpt", "logit_scale", 0.5),
        ("mpt", "no_bias", False),
        ("bloom", "apply_residual_connection_post_layernorm", True),
    ],
)
def test_models_with_alibi_of_other_kinds_are_refused(name: str, field: str, value: Any) -> None:
    values = OUR_DECODER[name]().to_dict()
    FAMILIES[name](Fields(Path("config.json"), values), name)
    section = values["attn_config"] if field in values.get("attn_config", {}) else values
    section[field] = value
    with pytest.raises(UnsupportedModelError, match=field):
        FAMILIES[name](Fields(Path("config.json"), values), name)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_rotary_embeddings_of_longrope(kind: str, tmp_path: Path) -> None:
    """Each token has the factors of the context length that it is computed for."""
    config = OUR_DECODER["phi3-longrope"]()
    save_tiny(config, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"longrope"', f'"{kind}"'))
    plan = plan_model(Checkpoint.open(tmp_path))
    assert isinstance(plan, DecoderPlan)
    assert plan.max_model_len == MAX_TOKENS
    assert plan.kv_limits == (ORIGINAL_TOKENS,)
    device = torch.device("cpu")
    angles = RotaryAngles(plan.spec.ropes[0], device)
    positions = torch.tensor([3, 3, 31, 32, 0, 100])
    contexts = torch.tensor([4, ORIGINAL_TOKENS + 1, ORIGINAL_TOKENS, 33, 120, 120])
    cos, sin = angles(positions, contexts)
    for row, (position, context) in enumerate(zip(positions, contexts.tolist(), strict=True)):
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=context)
        torch.testing.assert_close(cos[row], (position * frequencies).cos() * magnitude)
        torch.testing.assert_close(sin[row], (position * frequencies).sin() * magnitude)


def test_longrope_that_does_not_stretch(tmp_path: Path) -> None:
    """A model of the original length has no long contexts, and no limit."""
    config = OUR_DECODER["phi3-longrope"]()
    values = config.to_dict() | {"max_position_embeddings": ORIGINAL_TOKENS}
    spec = FAMILIES["phi3"](Fields(Path("config.json"), values), "Phi3")
    assert (spec.max_model_len, spec.kv_limits) == (ORIGINAL_TOKENS, ())


@pytest.mark.parametrize(("name", "prefix"), [("llama", "model."), ("gpt2", "transformer.")])
@pytest.mark.parametrize("num_stripped", [0, 1])
def test_names_of_a_base_model(name: str, prefix: str, num_stripped: int, tmp_path: Path) -> None:
    """A checkpoint that was saved without its head lacks the first part of its names."""
    check_names(name, prefix if num_stripped else "", tmp_path)


@pytest.mark.parametrize("stripped", ["", "model.", "model.decoder."])
def test_names_of_opt_models(stripped: str, tmp_path: Path) -> None:
    check_names("opt", stripped, tmp_path)


def check_names(name: str, stripped: str, folder: Path) -> None:
    """All parameters are found in a checkpoint whose names lack a prefix."""
    save_tiny(OUR_DECODER[name](), folder)
    file = folder / "model.safetensors"
    tensors = {key.removeprefix(stripped): tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file)
    checkpoint = Checkpoint.open(folder)
    plan = plan_model(checkpoint)
    assert isinstance(plan, DecoderPlan)
    sources = {source.name for parameter in plan.parameters for source in parameter.sources}
    assert sources == set(checkpoint.tensors)


def test_planner_chooses_the_dtype(tmp_path: Path) -> None:
    save_tiny(OUR_DECODER["llama"](), tmp_path / "llama")
    save_tiny(TRANSFORMERS["gpt_bigcode"](), tmp_path / "gpt_bigcode")
    planner: Planner = plan_model
    for folder in tmp_path.iterdir():
        for dtype in (torch.float16, torch.bfloat16):
            plan = planner(Checkpoint.open(folder), dtype)
            assert plan.kv_layout.dtype == dtype
            assert {parameter.dtype for parameter in plan.parameters} == {dtype}


def skeleton(num_layers: int, *attention: dict[str, Any]) -> Any:
    """Modules with these attributes, of a model with four heads."""
    modules = []
    for attributes in attention:
        module = torch.nn.Module()
        for attribute, value in attributes.items():
            setattr(module, attribute, value)
        modules.append(module)
    model = torch.nn.ModuleList(modules)
    config = SimpleNamespace(num_hidden_layers=num_layers, num_attention_heads=4)
    return SimpleNamespace(modules=model.modules, config=config)


def test_heads_that_differ_from_layer_to_layer() -> None:
    layout = read_kv_layout(
        skeleton(
            4,
            {"layer_idx": 0, "is_causal": True, "head_dim": 16, "num_key_value_groups": 2},
            {"layer_idx": 2, "is_causal": True, "head_dim": 64, "num_heads": 8},
            {"layer_idx": 1, "is_causal": True, "head_size": 32},
            {"layer_idx": 1, "name": "a decoder layer, which has an index and no attention"},
            {
                "layer_idx": 3,
                "is_causal": True,
                "head_dim": 8,
                "qk_head_dim": 24,
                "v_head_dim": 12,
            },
        ),
        torch.bfloat16,
        "Tiny",
    )
    layers = (LayerKV(2, 16, 16), LayerKV(4, 32, 32), LayerKV(8, 64, 64), LayerKV(4, 24, 12))
    assert layout == KVLayout(layers, torch.bfloat16)


def test_layouts_that_cannot_be_read_are_refused() -> None:
    known = {"layer_idx": 0, "is_causal": True, "head_dim": 16}
    for model, reason in [
        (skeleton(2, known), "1 of its 2 layers have attention"),
        (skeleton(1, known, {**known, "layer_idx": 1}), "2 of its 1 layers have attention"),
        (skeleton(1, {"layer_idx": 0, "is_causal": True}), "size of its attention heads"),
    ]:
        with pytest.raises(UnsupportedModelError, match=f"cannot serve Tiny: .*{reason}"):
            read_kv_layout(model, torch.float32, "Tiny")


def test_places_of_a_state() -> None:
    layer = (
        StateTensor("conv", (48, 3), torch.bfloat16),
        StateTensor("ssm", (2, 48, 16), torch.float32),
    )
    layout = StateLayout((layer, layer))
    assert [tensor.num_bytes for tensor in layer] == [48 * 3 * 2, 2 * 48 * 16 * 4]
    assert layout.offsets() == [[0, 512], [6656, 7168]]  # each at a multiple of 256 bytes
    assert layout.num_bytes == 2 * 6656
    assert StateLayout(()).num_bytes == 0
