"""Tiny models of every architecture that is served, made and saved by Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 199
MAX_TOKENS = 128  # longest context of each model
ORIGINAL_TOKENS = 32  # longest context before rotary scaling, for models with scaling
WINDOW_TOKENS = 5  # sliding window, for models with one

_MHA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
}
GQA: dict[str, Any] = {
    **_MHA,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OTHER_MHA = {"hidden_size": 96, "num_attention_heads": 6}
_OTHER_GQA = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
_STRETCHED = {**GQA, "max_position_embeddings": ORIGINAL_TOKENS}
_FACTOR = MAX_TOKENS / ORIGINAL_TOKENS


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


def _latent() -> dict[str, Any]:
    """Sizes of a DeepSeek model with a dense layer before two of experts."""
    return {
        **GQA,
        "num_key_value_heads": GQA["num_attention_heads"],
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    }


def _latent_yarn(mscale: float) -> dict[str, Any]:
    """As in the checkpoints of DeepSeek, but for the lengths."""
    return _rope(
        "yarn",
        factor=_FACTOR,
        original_max_position_embeddings=ORIGINAL_TOKENS,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


OUR_DECODER: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GQA),
    "llama-biases": lambda: transformers.LlamaConfig(**GQA, attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: transformers.LlamaConfig(**GQA, head_dim=20),
    "llama-tied": lambda: transformers.LlamaConfig(**GQA, tie_word_embeddings=True),
    "llama-linear": lambda: transformers.LlamaConfig(
        **_STRETCHED, rope_parameters=_rope("linear", factor=_FACTOR)
    ),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **_STRETCHED, rope_parameters=_rope("dynamic", factor=_FACTOR)
    ),
    "llama-llama3": lambda: transformers.LlamaConfig(
        **GQA,
        rope_parameters=_rope(
            "llama3",
            factor=_FACTOR,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=ORIGINAL_TOKENS,
        ),
    ),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **GQA,
        rope_parameters=_rope(
            "yarn", factor=_FACTOR, original_max_position_embeddings=ORIGINAL_TOKENS
        ),
    ),
    "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=WINDOW_TOKENS),
    "qwen2": lambda: transformers.Qwen2Config(**GQA),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **GQA, use_sliding_window=True, sliding_window=WINDOW_TOKENS, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=20),
    "ministral": lambda: transformers.MinistralConfig(
        **GQA, head_dim=16, sliding_window=WINDOW_TOKENS
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**GQA, "num_hidden_layers": 4},
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=WINDOW_TOKENS,
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**GQA, head_dim=20, attention_out_bias=True),
    "granite": lambda: transformers.GraniteConfig(
        **GQA,
        logits_scaling=0.5,
        attention_multiplier=0.3,
        embedding_multiplier=2.0,
        residual_multiplier=0.4,
    ),
    "gemma": lambda: transformers.GemmaConfig(**GQA, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **GQA,
        head_dim=16,
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **{**GQA, "num_hidden_layers": 6}, head_dim=16, sliding_window=WINDOW_TOKENS
    ),
    "gemma3_text-linear": lambda: transformers.Gemma3TextConfig(
        **{**GQA, "num_hidden_layers": 4},
        head_dim=16,
        sliding_window=WINDOW_TOKENS,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "phi": lambda: transformers.PhiConfig(**GQA),
    "phi-qk-norm": lambda: transformers.PhiConfig(
        **GQA,
        qk_layernorm=True,
        rope_parameters={**_rope("default"), "partial_rotary_factor": 0.25},
    ),
    "phi3": lambda: transformers.Phi3Config(**GQA, sliding_window=WINDOW_TOKENS),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **GQA,
        original_max_position_embeddings=ORIGINAL_TOKENS,
        rope_parameters=_rope(
            "longrope",
            short_factor=[
                1.0 + 0.1 * i for i in range(GQA["hidden_size"] // GQA["num_attention_heads"] // 2)
            ],
            long_factor=[
                2.0 + i for i in range(GQA["hidden_size"] // GQA["num_attention_heads"] // 2)
            ],
        ),
    ),
    "phi3-partial": lambda: transformers.Phi3Config(
        **GQA, rope_parameters={**_rope("default"), "partial_rotary_factor": 0.75}
    ),
    "olmo2": lambda: transformers.Olmo2Config(**GQA),
    "olmo3": lambda: transformers.Olmo3Config(
        **{**GQA, "num_hidden_layers": 4}, sliding_window=WINDOW_TOKENS
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **{**GQA, "num_hidden_layers": 4}, sliding_window=WINDOW_TOKENS
    ),
    "exaone4-full": lambda: transformers.Exaone4Config(
        **GQA, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "cohere": lambda: transformers.CohereConfig(**GQA, logit_scale=0.25),
    "cohere-qk-norm": lambda: transformers.CohereConfig(**GQA, use_qk_norm=True, logit_scale=0.5),
    "cohere2": lambda: transformers.Cohere2Config(
        **{**GQA, "num_hidden_layers": 4}, sliding_window=WINDOW_TOKENS, attention_bias=True
    ),
    "glm": lambda: transformers.GlmConfig(**GQA, head_dim=16),
    "glm4": lambda: transformers.Glm4Config(**GQA, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=MAX_TOKENS,
        scale_attn_by_inverse_layer_idx=True,
        pad_token_id=0,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_MHA, intermediate_size=96),
    "gpt_neox-serial": lambda: transformers.GPTNeoXConfig(
        **_MHA, intermediate_size=96, use_parallel_residual=False, attention_bias=False
    ),
    "gpt2-other": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=3,
        n_head=3,
        n_inner=80,
        n_positions=MAX_TOKENS,
        pad_token_id=0,
    ),
    "opt": lambda: transformers.OPTConfig(**_MHA, ffn_dim=96),
    "starcoder2": lambda: transformers.Starcoder2Config(**GQA, sliding_window=WINDOW_TOKENS),
    "stablelm": lambda: transformers.StableLmConfig(
        **GQA, rope_parameters={**_rope("default"), "partial_rotary_factor": 0.25}
    ),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **GQA,
        use_parallel_residual=True,
        qk_layernorm=True,
        use_qkv_bias=True,
        rope_parameters={**_rope("default"), "partial_rotary_factor": 0.5},
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **GQA, num_local_experts=4, sliding_window=WINDOW_TOKENS, output_router_logits=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GQA,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=WINDOW_TOKENS,
        norm_topk_prob=True,
    ),
    "mixtral-one-of-two": lambda: transformers.MixtralConfig(
        **GQA, num_local_experts=2, num_experts_per_tok=1, head_dim=20
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **GQA,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
    ),
    "qwen3_moe-some-dense": lambda: transformers.Qwen3MoeConfig(
        **{**GQA, "num_hidden_layers": 4},
        head_dim=16,
        moe_intermediate_size=40,
        num_experts=5,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**GQA, num_experts=6, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**GQA, "num_hidden_layers": 4},
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=WINDOW_TOKENS,
        rope_parameters=_rope(
            "yarn",
            factor=_FACTOR,
            original_max_position_embeddings=ORIGINAL_TOKENS,
            truncate=False,
        ),
    ),
    "gpt_oss-no-biases": lambda: transformers.GptOssConfig(
        **GQA,
        head_dim=20,
        num_local_experts=3,
        num_experts_per_tok=1,
        attention_bias=False,
        sliding_window=WINDOW_TOKENS,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=_rope("default"),
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_MHA["hidden_size"],
        n_layer=3,
        n_head=_MHA["num_attention_heads"],
        seq_length=MAX_TOKENS,
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCAB_SIZE,
        d_model=_MHA["hidden_size"],
        n_layers=2,
        n_heads=_MHA["num_attention_heads"],
        max_seq_len=MAX_TOKENS,
        attn_config={"softmax_scale": 0.3},
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **_latent(),
        q_lora_rank=None,
        topk_method="greedy",
        routed_scaling_factor=1.5,
        rope_parameters=_latent_yarn(0.707),
    ),
    "deepseek_v2-groups": lambda: transformers.DeepseekV2Config(
        **_latent(),
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_latent(),
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        rope_parameters=_latent_yarn(1.0),
    ),
    "deepseek_v3-plain": lambda: transformers.DeepseekV3Config(
        **_latent(),
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "falcon": lambda: transformers.FalconConfig(
        **_MHA, new_decoder_architecture=True, num_kv_heads=2, bias=True
    ),
    "falcon-one-norm": lambda: transformers.FalconConfig(
        **_MHA, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
}
"""Architectures that `aquifer.models.decoder` serves."""

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_PURE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in GQA.items() if key != "num_hidden_layers"},
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}

HYBRIDS: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: transformers.Mamba2Config(
        **_PURE, num_heads=8, head_dim=16, n_groups=2, state_size=8, chunk_size=8
    ),
    "mamba2-biases": lambda: transformers.Mamba2Config(
        **_PURE,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=6,
        chunk_size=8,
        use_bias=True,
        use_conv_bias=False,
        conv_kernel=3,
        tie_word_embeddings=True,
    ),
    "bamba": lambda: transformers.BambaConfig(**GQA, **_MAMBA2, attn_layer_indices=[1]),
    "bamba-biases": lambda: transformers.BambaConfig(
        **GQA,
        **_MAMBA2,
        attn_layer_indices=[0, 2],
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **GQA,
        **_MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        logits_scaling=0.5,
        attention_multiplier=0.3,
        embedding_multiplier=2.0,
        residual_multiplier=0.4,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid-dense": lambda: transformers.GraniteMoeHybridConfig(
        **GQA,
        **_MAMBA2,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        shared_intermediate_size=40,
        num_local_experts=0,
        position_embedding_type="rope",
        attention_multiplier=0.3,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **GQA,
        **_MAMBA2,
        mamba_d_ssm=96,
        lm_head_multiplier=0.4,
        embedding_multiplier=1.7,
        mlp_multipliers=[0.7, 1.3],
        key_multiplier=0.6,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.8,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.6,
    ),
    "falcon_h1-norm": lambda: transformers.FalconH1Config(
        **GQA,
        **_MAMBA2,
        head_dim=20,
        mamba_d_ssm=None,
        mamba_rms_norm=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        lm_head_multiplier=0.4,
        embedding_multiplier=1.7,
        mlp_multipliers=[0.7, 1.3],
        key_multiplier=0.6,
        attention_in_multiplier=1.2,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.6,
    ),
    "falcon_h1-gate-first": lambda: transformers.FalconH1Config(
        **GQA, **_MAMBA2, mamba_d_ssm=64, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_NEMOTRON, layers_block_type=["mamba", "mlp", "attention", "moe", "mamba", "mlp"]
    ),
    "nemotron_h-groups": lambda: transformers.NemotronHConfig(
        **_NEMOTRON,
        hybrid_override_pattern="*EME-",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=False,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **{**GQA, "num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=3,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=6,
        mamba_dt_rank=5,
    ),
    "jamba-dense": lambda: transformers.JambaConfig(
        **GQA,
        attn_layer_period=3,
        attn_layer_offset=0,
        num_experts=1,
        mamba_d_state=8,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "mamba": lambda: transformers.MambaConfig(**_PURE, state_size=6),
    "mamba-biases": lambda: transformers.MambaConfig(
        **_PURE,
        state_size=8,
        use_bias=True,
        use_conv_bias=False,
        conv_kernel=3,
        time_step_rank=7,
        tie_word_embeddings=False,
    ),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(**_PURE, state_size=6),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **{**GQA, "num_hidden_layers": 5},
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=20,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    ),
    "qwen3_next-dense": lambda: transformers.Qwen3NextConfig(
        **GQA,
        head_dim=20,
        attention_bias=True,
        rope_parameters={**_rope("default"), "partial_rotary_factor": 0.5},
        layer_types=["full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        num_experts=0,
    ),
}
"""Architectures with recurrent state that `aquifer.models.decoder` serves."""

TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "helium": lambda: transformers.HeliumConfig(**GQA, head_dim=16),
    "opt-350m-style": lambda: transformers.OPTConfig(
        **_MHA, ffn_dim=96, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=MAX_TOKENS,
        multi_query=True,
    ),
    "nemotron": lambda: transformers.NemotronConfig(**GQA, head_dim=16),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **GQA, num_local_experts=4, num_experts_per_tok=2
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **GQA, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    "persimmon": lambda: transformers.PersimmonConfig(**_MHA, intermediate_size=96),
    "deepseek_v3-biases": lambda: transformers.DeepseekV3Config(
        **_latent(),
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        attention_bias=True,
    ),
}
"""Architectures that `aquifer.models.transformers` serves."""

BOTH: dict[str, Callable[[], Any]] = {
    name: OUR_DECODER[name]
    for name in (
        "cohere",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "mixtral",
        "olmo2",
        "opt",
        "phi3",
        "phi3-longrope",
        "qwen3_moe",
    )
}
"""Architectures of our decoder that `aquifer.models.transformers` could serve as well."""


def other_shape(name: str) -> Any:
    """The configuration of an architecture of our decoder, with other sizes."""
    saved = dict(_MHA), dict(GQA)
    _MHA.update(_OTHER_MHA)
    GQA.update(_OTHER_GQA)
    try:
        return OUR_DECODER[name]()
    finally:
        for shape, before in zip((_MHA, GQA), saved, strict=True):
            shape.update(before)


def save_tiny(config: Any, folder: Path, seed: int = 1) -> Any:
    """Save a model with random float32 weights; returns Transformers' own model."""
    torch.manual_seed(seed)
    # "eager", because some versions omit Gemma 2's soft caps in the faster implementations.
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for tensor in model.parameters():
        if tensor.ndim > 1:
            # Large enough that attention is far from uniform and soft caps have an effect.
            torch.nn.init.normal_(tensor, std=1.5 * tensor.shape[-1] ** -0.5)
        else:
            tensor.data += 0.2 * torch.randn_like(tensor)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model
