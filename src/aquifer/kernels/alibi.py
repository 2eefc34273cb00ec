"""ALiBi: attention with linear biases in place of positions (Press et al. 2022, section 3).

Each query head h has a slope m_h. The score of a key falls with its distance from the query:

    score = scale * q . k - m_h * (position of q - position of k)

The bias is neither multiplied by the scale nor capped. `slopes` is [heads] float32.
"""

from __future__ import annotations

import torch

from aquifer.kernels._triton import constexpr, jit, tensor, tl


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """Slopes of the heads, [num_heads] float32.

    For a power of two heads they are 2**(-8 i / heads), i = 1, 2, ... For another number of heads,
    those of the next lower power of two, and then every other one of twice that power.
    """
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [i / power for i in range(1, power + 1)]
    exponents += [i / (2 * power) for i in range(1, 2 * power, 2)]
    exact = torch.tensor(exponents[:num_heads], dtype=torch.float64)
    return torch.exp2(-8 * exact).to(device, torch.float32)


def with_alibi(
    scores: torch.Tensor,
    slopes: torch.Tensor | None,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
) -> torch.Tensor:
    """Scores with the bias of each head.

    Args:
        scores: [kv_heads, group, queries, keys]; query head h is at [h // group, h % group].
        slopes: [kv_heads * group]; None for no bias.
        query_positions: [queries].
        key_positions: [keys].
    """
    if slopes is None:
        return scores
    distance = key_positions - query_positions.unsqueeze(1)
    return scores + slopes.to(scores.dtype).view(*scores.shape[:2], 1, 1) * distance


@jit
def load_slopes(slopes: tensor, head: tensor, is_head: tensor) -> tensor:
    """Load the slopes of some heads, for scores in powers of two."""
    log2_e: constexpr = 1.4426950408889634
    return tl.load(slopes + head, mask=is_head, other=0.0) * log2_e
