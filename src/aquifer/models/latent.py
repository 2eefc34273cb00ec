"""Multi-head latent attention of one layer (DeepSeek-V2, section 2.1), in the absorbed form.

The cache has one row for each token: a latent, from which the keys and values of all heads could be
expanded, and a rotated key that all heads share. With the rows K_h and V_h of a head in the
expanding matrix, `query . (K_h latent) = (K_h^T query) . latent`, and a weighted sum of values is
V_h times the weighted sum of latents. So the query is multiplied by K_h once, the result by V_h,
and attention reads latents only (`kernels/latent_attention.py`).

That is less to read, and 3.4 times as much to compute for the sizes of DeepSeek. So where a step is
whole prompts of `LEAST_PROMPT_TOKENS` at least, whose latents are all of that step, their keys and
values are expanded and attended to as in other models. Chunks after a prefix are not: the prefix
would have to be expanded for each. Nor are steps that are captured in pieces, which do not know
their sequences; these have few tokens (`engine/captured.py`).
"""

from __future__ import annotations

import itertools

import torch

from aquifer.cache.base import AttentionOptions, KVView
from aquifer.kernels.latent import head_products, latent_rope_write
from aquifer.kernels.linear import linear, norm_linear
from aquifer.kernels.prefill_attention import PrefillSpans, prefill_attention
from aquifer.models.parts import LatentAttention
from aquifer.models.tensors import Tensors

LEAST_PROMPT_TOKENS = 512
"""Shorter prompts are not expanded: products and other operations take more time than attention."""


class LatentLayer:
    """Latent attention of one layer, between the fused projection and the output projection.

    Args:
        of: its sizes.
        tensors: parameters of `DecoderPlan`, by name.
        name: begins the names of the layer's own.
        index: of the layer in the KV layout.
        how: how it attends.
    """

    def __init__(
        self,
        of: LatentAttention,
        tensors: Tensors,
        name: str,
        index: int,
        how: AttentionOptions,
    ) -> None:
        self._of = of
        self._index = index
        self._how = how
        self._q_norm = tensors.get(f"{name}q_a_norm.weight")  # [q_rank]
        self._q_b = tensors.get(f"{name}q_b.weight")  # [heads * (nope + rope), q_rank]
        self._kv_norm = tensors[f"{name}kv_a_norm.weight"]  # [kv_rank]
        self._kv_b = tensors[f"{name}kv_b.weight"]  # [heads * (nope + value), kv_rank]
        both = self._kv_b.unflatten(0, (of.num_heads, -1))
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
        keys, _, first, second = kv.destination(self._index)
        prompts = kv.whole_prompts()
        if prompts is not None and prompts.least_tokens >= LEAST_PROMPT_TOKENS:
            absorbed, rotated = None, heads[..., of.nope_dim :]  # in place
        else:
            absorbed = product.new_empty(len(product), of.num_heads, of.kv_rank + of.rope_dim)
            rotated = absorbed[..., of.kv_rank :]
        latent_rope_write(
            heads[..., of.nope_dim :],
            row,
            self._kv_norm,
            cos,
            sin,
            rotated,
            keys,
            first,
            second,
            eps=of.norm.eps,
            is_interleaved=of.is_interleaved,
        )
        if absorbed is None:
            assert prompts is not None
            return self._attend_expanded(heads, keys[first, second, 0], prompts).flatten(1)
        head_products(heads[..., : of.nope_dim], self._keys, absorbed[..., : of.kv_rank])
        attended = kv.attend(self._index, absorbed, self._how)  # [tokens, heads, kv_rank]
        out = attended.new_empty(len(product), of.num_heads, of.value_dim)
        head_products(attended, self._values, out)
        return out.flatten(1)

    def _attend_expanded(
        self, query: torch.Tensor, rows: torch.Tensor, prompts: PrefillSpans
    ) -> torch.Tensor:
        """Attend to keys and values of all heads.

        Args:
            query: [tokens, heads, nope + rope], rotated.
            rows: [tokens, kv_rank + rope], as in the cache.
            prompts: whole prompts, of all tokens.

        Returns:
            [tokens, heads, value_dim].
        """
        of = self._of
        latent, shared = rows.split((of.kv_rank, of.rope_dim), dim=1)
        both = linear(latent, self._kv_b, None).unflatten(1, (of.num_heads, -1))
        nope, values = both.split((of.nope_dim, of.value_dim), dim=2)
        shared = shared.unsqueeze(1).expand(-1, of.num_heads, -1)
        keys = torch.cat((nope, shared), dim=2)  # [tokens, heads, nope + rope]
        out = query.new_empty(values.shape)
        for index, (begin, end) in enumerate(itertools.pairwise(prompts.offsets)):
            prefill_attention(
                query,
                keys[None, begin:end],
                values[None, begin:end],
                None,
                prompts.alone(index),
                out,
                scale=self._how.scale,
            )
        return out
