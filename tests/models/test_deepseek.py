"""Configurations of DeepSeek-V2 and V3: sizes of real models, fields that are refused, and what a
checkpoint may have besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import OUR_DECODER, save_tiny
from tests.models.serving import StepKV, loaded_model, served_logits

from aquifer.cache import KV_CACHES
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.engine.params import SamplingParams
from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.fields import Fields
from aquifer.kernels.prefill_attention import prefill_attention
from aquifer.llm import LLM
from aquifer.models import latent, plan_model
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.models.families import FAMILIES
from aquifer.models.spec import DecoderSpec, LatentAttention
from aquifer.models.transformers import TransformersPlan
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.parameters import check_sources

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# The parts of the published configurations that describe the model.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    **LATENT,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "attention_bias": False,
    "tie_word_embeddings": False,
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
MODELS = {"deepseek_v2": V2_LITE, "deepseek_v3": V3}


def save_config(folder: Path, config: dict[str, Any]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.without_tensors(folder)


def read(config: dict[str, Any]) -> DecoderSpec:
    return FAMILIES[config["model_type"]](Fields(Path("config.json"), config), "DeepSeek")


@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str, tmp_path: Path) -> None:
    """Sizes, and the scale of attention, are those of Transformers' model."""
    plan = plan_model(save_config(tmp_path, MODELS[name]))
    assert isinstance(plan, DecoderPlan)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    assert plan.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    num_layers = config.num_hidden_layers
    row = LayerKV(1, 576, 512, is_latent=True)
    assert plan.kv_layout == KVLayout((row,) * num_layers, torch.bfloat16)
    assert plan.kv_layout.token_bytes == num_layers * 1152
    assert plan.max_model_len == 163840
    (scale,) = {layer.scale for layer in plan.spec.layers}
    assert scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-12)
    (rope,) = plan.spec.ropes
    assert rope.magnitude == 1.0
    has_experts = [layer.has_experts for layer in plan.spec.layers]
    assert has_experts == [i >= config.first_k_dense_replace for i in range(num_layers)]


def test_the_bias_of_routers_stays_in_float32(tmp_path: Path) -> None:
    plan = plan_model(save_config(tmp_path, V3))
    assert isinstance(plan, DecoderPlan)
    wide = {p.name.partition(".")[2] for p in plan.parameters if p.dtype == torch.float32}
    assert wide == {f"{index}.choice_bias" for index in range(3, 61)}
    assert plan.spec.experts is not None
    assert plan.spec.experts.routes_in_float32


def test_queries_are_compressed_unless_the_rank_is_null() -> None:
    absent = {name: value for name, value in V3.items() if name != "q_lora_rank"}
    for config, rank in [(V3, 1536), (absent, 1536), ({**V3, "q_lora_rank": None}, None)]:
        attention = read(config).attention
        assert isinstance(attention, LatentAttention)
        assert attention.q_rank == rank


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a whole number from 1"),
        ("deepseek_v2", {"q_lora_rank": "x"}, "q_lora_rank is .*; it must be a whole number"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even"),
        ("deepseek_v2", {"qk_nope_head_dim": -1}, "qk_nope_head_dim is -1"),
        ("deepseek_v2", {"v_head_dim": 1.5}, "v_head_dim is 1.5"),
        ("deepseek_v2", {"num_key_value_heads": 4}, "num_key_value_heads is 4; .* the 16 heads"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is null; it must be"),
        ("deepseek_v2", {"num_experts_per_tok": 65}, "num_experts_per_tok is 65; .* to 64"),
        ("deepseek_v2", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("deepseek_v2", {"n_shared_experts": 4096}, "n_shared_experts is 4096; .* at most 744"),
        ("deepseek_v3", {"n_group": 7}, "n_group is 7; it must be such that it divides 256"),
        ("deepseek_v3", {"n_group": 256}, "n_group is 256; .* by 2 at least"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group is 9; .* to 8"),
        ("deepseek_v3", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; .* to 128"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek_v3", {"routed_scaling_factor": "x"}, "routed_scaling_factor is .* a number"),
        ("deepseek_v3", {"rope_interleave": 1}, "rope_interleave is 1; it must be true or false"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}},
            r"lacks rope_scaling\.factor",
        ),
    ],
)
def test_impossible_fields(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(MODELS[name] | fields)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "scoring_func 'softmax' with .* 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "'gelu' is not silu"),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, "have a bias"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_unsupported_fields(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(MODELS[name] | fields)


def test_what_our_decoder_lacks_goes_to_transformers(tmp_path: Path) -> None:
    config = OUR_DECODER["deepseek_v3-plain"]()
    config.attention_bias = True
    save_tiny(config, tmp_path)
    assert isinstance(plan_model(Checkpoint.open(tmp_path)), TransformersPlan)


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(UnsupportedModelError, match="its weights are quantised"):
        plan_model(save_config(tmp_path, V3 | fp8))


def test_tensors_in_eight_bits_are_refused(tmp_path: Path) -> None:
    checkpoint, tensors = tiny_tensors(tmp_path)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    checkpoint = save_tensors(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"kv_b_proj.*quantised checkpoints are not supported"):
        check_sources(checkpoint, plan_model(checkpoint).parameters)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    checkpoint, tensors = tiny_tensors(tmp_path)
    before = plan_model(checkpoint)
    extra = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.2." in name
    }
    extra["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    extra["model.layers.3.shared_head.head.weight"] = torch.zeros(199, 64)
    checkpoint = save_tensors(tmp_path, tensors | extra)
    plan = plan_model(checkpoint)
    check_sources(checkpoint, plan.parameters)
    assert list(plan.parameters) == list(before.parameters)
    assert len(plan.kv_layout.layers) == 3


@pytest.mark.parametrize(
    "name", ["deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "deepseek_v3-plain"]
)
@pytest.mark.parametrize("least_tokens", [3, 4])
def test_whole_prompts_are_expanded(
    name: str, least_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of Transformers, whether or not the first chunks are long enough."""
    reference = save_tiny(OUR_DECODER[name](), tmp_path)
    expanded: list[tuple[int, ...]] = []

    def attend(query: torch.Tensor, keys: torch.Tensor, *others: Any, **options: Any) -> Any:
        expanded.append(tuple(keys.shape))
        return prefill_attention(query, keys, *others, **options)

    monkeypatch.setattr(latent, "prefill_attention", attend)
    monkeypatch.setattr(latent, "LEAST_PROMPT_TOKENS", least_tokens)
    random = torch.Generator().manual_seed(3)
    sequences = [torch.randint(199, (count,), generator=random) for count in (17, 6, 11)]
    with loaded_model(Checkpoint.open(tmp_path), plan_model) as model:
        logits = served_logits(model, sequences, StepKV)
    # The first step has 3 tokens of two sequences each, in any of 3 layers.
    assert expanded == [(1, 3, 4, 24)] * (6 if least_tokens == 3 else 0)
    with torch.no_grad():
        for ids, actual in zip(sequences, logits, strict=True):
            torch.testing.assert_close(actual, reference(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_expanded_prompts_are_found_by_later_requests(
    kv_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an expanded prompt leaves in the cache is what it leaves otherwise."""
    save_tiny(OUR_DECODER["deepseek_v2"](), tmp_path, 2)
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(199, (n,), generator=random).tolist() for n in (33, 70, 12)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    results = []
    for least_tokens in (10**9, 8):
        monkeypatch.setattr(latent, "LEAST_PROMPT_TOKENS", least_tokens)
        with LLM(tmp_path, memory="16MiB", kv_cache=kv_cache) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                results.append([output.outputs[0].token_ids for output in outputs])
    assert results == results[:1] * 4


def tiny_tensors(folder: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """A tiny model of the third version, with its tensors."""
    save_tiny(OUR_DECODER["deepseek_v3"](), folder)
    return Checkpoint.open(folder), load_file(folder / "model.safetensors")


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)
