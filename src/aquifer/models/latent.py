"""Multi-head latent attention of one layer (DeepSeek-V2, section 2.1), in the absorbed form.

The cache has one row for each token: a latent, from which the keys and values of all heads could be
expanded, and a rotated key that all heads share. With the rows K_h and V_h of a head in the
expanding matrix, `query . (K_h latent) = (K_h^T query) . latent`, and a weighted sum of values is
V_h times the weighted sum of latents. So the query is multiplied by K_h once, the result by V_h,
and attention reads latents only (`kernels/latent_attention.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aquifer.cache.base import AttentionOptions, KVView
from aquifer.kernels.latent import head_products, latent_rope_write
from aquifer.kernels.linear import norm_linear
from aquifer.models.spec import LatentAttention


class LatentLayer:
    """Latent attention of one layer, between the fused projection and the output projection.

    Args:
        of: its sizes.
        tensors: parameters of `DecoderPlan`, by name.
        index: the layer's number, also in the KV layout.
        how: how it attends.
    """

    def __init__(
        self,
        of: LatentAttention,
        tensors: Mapping[str, torch.Tensor],
        index: int,
        how: AttentionOptions,
    ) -> None:
        name = f"layers.{index}."
        self._of = of
        self._index = index
        self._how = how
        self._q_norm = tensors.get(f"{name}q_a_norm.weight")  # [q_rank]
        self._q_b = tensors.get(f"{name}q_b.weight")  # [heads * (nope + rope), q_rank]
        self._kv_norm = tensors[f"{name}kv_a_norm.weight"]  # [kv_rank]
        # [heads, nope + value, kv_rank]
        both = tensors[f"{name}kv_b.weight"].unflatten(0, (of.num_heads, -1))
        self._keys = both[:, : of.nope_dim]  # [heads, nope, kv_rank]
        self._values = both[:, of.nope_dim :].transpose(1, 2)  # [heads, kv_rank, value]

    def attend(
        self, product: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVView
    ) -> torch.Tensor:
        """Write the tokens' rows to the cache, and attend.

        Args:
            product: [tokens, rows of q + rows of kv], the fused projection.
            cos: [tokens, rope_dim / 2] float32.
            sin: [tokens, rope_dim / 2] float32.
            kv: the step's KV.

        Returns:
            [tokens, heads * value_dim].
        """
        of = self._of
        query, row = product.split(of.qkv_rows, dim=1)
        if self._q_norm is not None and self._q_b is not None:
            query, _ = norm_linear(None, query, self._q_norm, of.norm.eps, self._q_b, None)
        heads = query.unflatten(1, (of.num_heads, -1))  # [tokens, heads, nope + rope]
        absorbed = product.new_empty(len(product), of.num_heads, of.kv_rank + of.rope_dim)
        keys, _, first, second = kv.destination(self._index)
        latent_rope_write(
            heads[..., of.nope_dim :],
            row,
            self._kv_norm,
            cos,
            sin,
            absorbed[..., of.kv_rank :],
            keys,
            first,
            second,
            eps=of.norm.eps,
            is_interleaved=of.is_interleaved,
        )
        head_products(heads[..., : of.nope_dim], self._keys, absorbed[..., : of.kv_rank])
        attended = kv.attend(self._index, absorbed, self._how)  # [tokens, heads, kv_rank]
        out = attended.new_empty(len(product), of.num_heads, of.value_dim)
        head_products(attended, self._values, out)
        return out.flatten(1)
