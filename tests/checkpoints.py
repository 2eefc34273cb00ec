"""Tiny checkpoints with random weights, and a tokenizer for them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("</s>")
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_llama(path: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Save a Llama of a few thousand random weights, with tokenizer and chat template.

    Args:
        path: the folder to make.
        seed: seed of the weights.
        config_overrides: entries of config.json; the weights have shapes to match.

    Returns: `path`.
    """
    config = llama_config(**config_overrides)
    save_checkpoint(path, config, llama_weights(config, seed))
    _tokenizer().save(str(path / "tokenizer.json"))
    for name, content in {
        "generation_config.json": {"eos_token_id": EOS_TOKEN_ID},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": CHAT_TEMPLATE,
        },
    }.items():
        (path / name).write_text(json.dumps(content))
    return path


def save_checkpoint(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Make a folder with config.json and model.safetensors, without a tokenizer."""
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def llama_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
        **overrides,
    }


def llama_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a Llama, under the names of the hub."""
    generator = torch.Generator().manual_seed(seed)
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    norms = ["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms += [f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"]
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (q, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}.mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, mlp),
        }
    dtype = getattr(torch, config["torch_dtype"])
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.15).to(dtype)
        for name, shape in shapes.items()
    }
    return weights | {name: torch.ones(hidden, dtype=dtype) for name in norms}


def _tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merged pairs of letters, so that the vocabulary is full."""
    pairs = itertools.product("etaoins", "etaoinsr")
    merges = list(itertools.islice(pairs, VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)))
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer
