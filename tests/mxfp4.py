"""Experts of GPT-OSS in MXFP4: a packer, a plain decoder, and checkpoints saved both ways."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK_VALUES = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CONFIG = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
}
"""What OpenAI's checkpoints have in config.json."""


def pack(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., out, in] to the nearest numbers, with scales that the largest ones ask for.

    Returns: blocks [..., out, in / 32, 16] and scales [..., out, in / 32], both uint8.
    """
    grouped = weights.double().unflatten(-1, (-1, BLOCK_VALUES))
    largest = grouped.abs().amax(-1).clamp(min=2.0**-100)
    exponents = largest.log2().floor() - math.log2(4)  # so that the largest is 4 or more
    scaled = grouped / torch.exp2(exponents)[..., None]
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64)
    nearest = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1)
    codes = (nearest + 8 * scaled.signbit()).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8)


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode number by number in Python's floats: float64 [..., out, in]."""
    values = []
    for block, scale in zip(
        blocks.reshape(-1, 16).tolist(), scales.flatten().tolist(), strict=True
    ):
        factor = math.ldexp(1.0, scale - 127)
        for byte in block:
            for code in (byte & 15, byte >> 4):
                sign = -1.0 if code & 8 else 1.0
                values.append(sign * MAGNITUDES[code & 7] * factor)
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK_VALUES)
    return torch.tensor(values, dtype=torch.float64).view(shape)


def experts_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights of experts, each of [experts, in, out]."""
    return [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]


def quantise(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Quantise the experts of a checkpoint of GPT-OSS in place.

    Args:
        folder: the checkpoint, of one file.
        dtype: dtype of the other tensors, and of the experts in the copy.

    Returns: a folder beside it with the same weights, the experts decoded.
    """
    decoded_folder = shutil.copytree(folder, folder.with_name(folder.name + "-decoded"))
    tensors = {
        name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    decoded = dict(tensors)
    for name in experts_of(tensors):
        blocks, scales = pack(tensors.pop(name).mT)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded[name] = unpack(blocks, scales).mT.to(dtype).contiguous()
    save_file(tensors, folder / "model.safetensors")
    save_file(decoded, decoded_folder / "model.safetensors")
    edit_config(folder, dtype=None, **CONFIG)  # OpenAI's names no dtype
    edit_config(decoded_folder, dtype=str(dtype).removeprefix("torch."))
    return decoded_folder


def edit_config(folder: Path, **entries: Any) -> None:
    """Change entries of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
