"""Both ends of a decoder: embeddings of tokens, and their scores.

Each rank of a group has the rows of as many tokens. The last ones may have padding: rows of zeros
that no token has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aquifer.kernels.linear import linear
from aquifer.models.collectives import Collectives
from aquifer.models.spec import Head
from aquifer.models.tensors import Tensors


class Vocabulary:
    """The embedding and the head of a decoder, over loaded parameters.

    Args:
        head: from hidden states to logits.
        tensors: parameters of `DecoderPlan`, by name.
        collectives: the other ranks.

    Attributes:
        dtype: dtype of the embeddings.
        device: where they are.
    """

    def __init__(self, head: Head, tensors: Tensors, collectives: Collectives) -> None:
        self._of = head
        self._collectives = collectives
        self._embed = tensors["embed"]  # [rows, hidden]
        self._head = tensors.get("head", self._embed)  # [rows, hidden]
        self._head_bias = tensors.get("head_bias")  # [rows]
        self.dtype, self.device = self._embed.dtype, self._embed.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings: [tokens] -> [tokens, hidden]."""
        if self._collectives.size == 1:
            return F.embedding(token_ids, self._embed)
        num_rows = len(self._embed)
        rows = token_ids - self._collectives.rank * num_rows
        is_own = (rows >= 0) & (rows < num_rows)
        own = F.embedding(rows.clamp(0, num_rows - 1), self._embed) * is_own.unsqueeze(1)
        (hidden,) = self._collectives.total(own)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of this rank's tokens: [n, hidden] -> [n, rows]."""
        logits = linear(hidden, self._head, self._head_bias)
        if self._of.scale != 1.0:
            logits = logits * self._of.scale
        if self._of.softcap is not None:
            logits = torch.tanh(logits / self._of.softcap) * self._of.softcap
        return logits
