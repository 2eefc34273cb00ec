"""The families that our own decoder serves: how their configurations are read.

A family is a function from a configuration to a `DecoderSpec`. To add one, write it beside its
kin, and name its model type here.
"""

from __future__ import annotations

from collections.abc import Callable

from aquifer.fields import Fields
from aquifer.models.families import (
    bamba,
    bloom,
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    jamba,
    llama,
    mamba,
    moe,
    nemotron_h,
    olmo,
    opt,
    phi,
    qwen3_next,
    stablelm,
    starcoder2,
    zamba2,
)
from aquifer.models.spec import DecoderSpec

Family = Callable[[Fields, str], DecoderSpec]
"""Reads a configuration, given its fields and the name of the architecture for messages.

It raises `ConfigError` if a field is missing or impossible, and `UnsupportedModelError` if it asks
for something that the decoder does not implement.
"""

FAMILIES: dict[str, Family] = {
    "bamba": bamba.read,
    "bloom": bloom.read,
    "cohere": cohere.read,
    "cohere2": cohere.read,
    "deepseek_v2": deepseek.read,
    "deepseek_v3": deepseek.read,
    "exaone4": olmo.read_exaone,
    "falcon": falcon.read,
    "falcon_h1": bamba.read_falcon,
    "falcon_mamba": mamba.read,
    "gemma": gemma.read,
    "gemma2": gemma.read,
    "gemma3_text": gemma.read_third,
    "glm": glm.read_first,
    "glm4": glm.read,
    "gpt2": gpt2.read,
    "gpt_neox": gpt_neox.read,
    "gpt_oss": gpt_oss.read,
    "granite": llama.read,
    "granitemoehybrid": bamba.read_granite,
    "jamba": jamba.read,
    "llama": llama.read,
    "mamba": mamba.read,
    "mamba2": mamba.read,
    "ministral": llama.read,
    "mistral": llama.read,
    "mixtral": moe.read,
    "mpt": bloom.read_mpt,
    "nemotron_h": nemotron_h.read,
    "olmo2": olmo.read_second,
    "olmo3": olmo.read_third,
    "olmoe": moe.read,
    "opt": opt.read,
    "phi": phi.read,
    "phi3": phi.read_third,
    "qwen2": llama.read,
    "qwen2_moe": moe.read,
    "qwen3": llama.read,
    "qwen3_moe": moe.read,
    "qwen3_next": qwen3_next.read,
    "seed_oss": llama.read,
    "smollm3": llama.read,
    "stablelm": stablelm.read,
    "starcoder2": starcoder2.read,
    "zamba2": zamba2.read,
}
"""By model type, the `model_type` of a configuration."""

__all__ = ["FAMILIES", "Family"]
