"""Sampling in plain torch: the specification."""

from __future__ import annotations

import math

import torch

from aquifer.kernels.sampling.columns import GREEDY_BELOW, IN_PROMPT, SamplingColumns

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def sample_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
) -> None:
    """`sample` in plain torch, in float64, row by row."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        scores = logits[row].float()
        counts_row = int(columns.counts_row[slot])
        if counts_row >= 0:
            repetition, presence, frequency = columns.floats[3:, slot]
            counts = columns.counts[counts_row]
            changed = torch.where(scores > 0, scores / repetition, scores * repetition)
            scores = torch.where(counts != 0, changed, scores)
            output = counts % IN_PROMPT
            scores = torch.where(output > 0, scores - (presence + frequency * output), scores)
        temperature = float(columns.temperature[slot])
        if temperature < GREEDY_BELOW:
            token = int(scores.argmax())
        else:
            number = number_reference(int(columns.seed[slot]), int(num_tokens[row]))
            token = _draw_reference(scores / temperature, number, slot, columns)
        out[row] = token
        if counts_row >= 0:
            columns.counts[counts_row, token] += 1


def _draw_reference(
    scores: torch.Tensor, number: float, slot: int, columns: SamplingColumns
) -> int:
    """Draw a token for one row, [vocab], which is sorted if it has top-k or top-p."""
    weights = (scores.double() - scores.max()).exp()
    weights = torch.where(weights < columns.min_p[slot], 0.0, weights)
    ids = torch.arange(len(weights), device=weights.device)
    top_k, top_p = int(columns.top_k[slot]), columns.top_p[slot]
    if 0 < top_k < len(weights) or top_p < 1:
        weights, ids = weights.sort(descending=True, stable=True)
        if top_k > 0:
            weights[top_k:] = 0
        before = weights.cumsum(0) - weights
        weights = torch.where(before < top_p * weights.sum(), weights, 0.0)
    sums = weights.cumsum(0)
    column = min(int((sums <= number * sums[-1]).sum()), int(weights.nonzero()[-1]))
    return int(ids[column])


def number_reference(seed: int, counter: int) -> float:
    """Return one number in [0, 1): Philox4x32-10 with this key and counter, see philox.py."""
    c = [counter & _LOW, (counter >> 32) & _LOW, 0, 0]
    k = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(10):
        high0, low0 = divmod(_PHILOX_MULTIPLIERS[0] * c[0], 1 << 32)
        high1, low1 = divmod(_PHILOX_MULTIPLIERS[1] * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(part + step) & _LOW for part, step in zip(k, _PHILOX_KEY_STEPS, strict=True)]
    return math.ldexp((c[0] << 32 | c[1]) >> 11, -53)
