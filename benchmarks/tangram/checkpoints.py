"""The eight models of `device.py`, as folders with a config.json and no weights.

Their shapes are those of `EIGHT` in `mixes.py`. Engines give such models random weights
(`--load-format dummy`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
}
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen-2.5-0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "opt-1.3b": {
        **_OPT,
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
    },
    "qwen-2.5-3b": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
    "llama-3.2-3b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "opt-6.7b": {
        **_OPT,
        "hidden_size": 4096,
        "word_embed_proj_dim": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "yi-9b": {
        **_LLAMA,
        "vocab_size": 64000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "glm-4-9b": {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}
"""Configurations by name, in ascending order of size; weights in bfloat16."""


def write_folders(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Write a folder for each model; returns them by name."""
    found: dict[str, Path] = {}
    for name, config in configs.items():
        found[name] = folder / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    return found
