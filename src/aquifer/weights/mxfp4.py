"""MXFP4, the format of 4-bit numbers in which the experts of GPT-OSS are stored, decoded.

32 numbers of a row share a scale, a power of two. A number is one of 16 values and takes four bits;
the scale's exponent takes eight (OCP Microscaling Formats, version 1.0). Checkpoints have the
numbers in one tensor, two in a byte, and the scales in another. Each tensor is decoded by itself,
with a table: the numbers are written first, then they are multiplied by their scales. A bfloat16 or
float32 holds every product exactly, or infinity from 2**128 on; a float16 holds those from 2**-24
to 65504, and others are rounded.

A scale of 255 stands for NaN in the format. Here it is 2**128, as in Transformers: of the numbers
that share it, those of 1 or more become infinite, which the model's first step warns of.

Temporary memory is a few megabytes, however large the tensors are. One thread of the host decodes
about 0.9 GB/s of stored bytes, which is 3.4 GB/s of bfloat16; torch divides each step among its
threads. A GPU gets the stored bytes, a quarter of those of bfloat16, and decodes them itself.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK_VALUES = 32
"""Numbers that share a scale."""

BLOCK_BYTES = BLOCK_VALUES // 2
"""Bytes of these numbers."""

_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""The magnitudes, times two. Scales are halved, so that a float32 holds the largest one, too."""

_HALVED_BIAS = 128  # added to the exponent of a halved scale; 127 to that of the scale itself
_TWO_VALUES = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # by the bytes of one
_STEP_BYTES = {"cpu": 1 << 20}  # of numbers that are decoded at a time: what caches hold
_DEVICE_STEP_BYTES = 2 << 20  # on a GPU, where fewer launches pay; their indices take 8 MiB


def write_numbers(packed: torch.Tensor, values: torch.Tensor, first_byte: int) -> None:
    """Decode numbers, doubled and without their scales.

    Args:
        packed: [n] uint8, on the host or on the device of `values`. The low four bits of a byte are
            the first of its two numbers; of four bits, the highest one is the sign.
        values: [numbers], contiguous, of a floating dtype; [2 first_byte, 2 (first_byte + n)) of it
            are written.
        first_byte: number of the first byte.
    """
    table = _byte_table(values.dtype, values.device)
    out = values.view(table.dtype)[first_byte : first_byte + len(packed)]  # two values in each
    step = _step_bytes(values.device)
    for part, out_part in zip(packed.split(step), out.split(step), strict=True):
        torch.index_select(table, 0, _indices(part, values.device), out=out_part)


def multiply_by_scales(exponents: torch.Tensor, values: torch.Tensor, first_block: int) -> None:
    """Multiply numbers that `write_numbers` has written by their scales, halved.

    Args:
        exponents: [n] uint8, of 2**(exponent - 127); on the host or on the device of `values`.
        values: [blocks x 32], contiguous, of a floating dtype; blocks
            [first_block, first_block + n) are multiplied.
        first_block: number of the first block.
    """
    table = _scale_table(values.dtype, values.device)
    blocks = values.view(-1, BLOCK_VALUES)[first_block : first_block + len(exponents)]
    step = _step_bytes(values.device) // BLOCK_BYTES
    for part, block_part in zip(exponents.split(step), blocks.split(step), strict=True):
        scales = torch.index_select(table, 0, _indices(part, values.device))
        block_part.mul_(scales[:, None])


def _step_bytes(device: torch.device) -> int:
    return _STEP_BYTES.get(device.type, _DEVICE_STEP_BYTES)


def _indices(stored: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bytes as indices of a table on a device; those on the host may be in page-locked memory."""
    return stored.to(device, non_blocking=True).int()


@cache
def _byte_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, doubled: [256], in a dtype as large as two of them."""
    numbers = torch.tensor([*_DOUBLED, *(-magnitude for magnitude in _DOUBLED)], dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=1)
    return pairs.view(_TWO_VALUES[dtype.itemsize]).squeeze(1).to(device)


@cache
def _scale_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The scale of each exponent, halved: [256].

    A float16 holds few of them: they multiply in float32, and the result is rounded.
    """
    scales = [2.0 ** (exponent - _HALVED_BIAS) for exponent in range(256)]
    held = torch.float32 if dtype == torch.float16 else dtype
    return torch.tensor(scales, dtype=held, device=device)
