"""From hidden states to logits and tokens: on one device, or on all ranks of a group.

Each rank of a group has the logits of some tokens. Steps in which all rows are greedy or have a
temperature alone leave them there and exchange a few numbers; all else needs whole rows, which are
joined first.
"""

from __future__ import annotations

import torch

from aquifer.engine.sampler import Sampler, SamplingMode
from aquifer.kernels.sampling.parts import VocabularyPart, choose, summarise
from aquifer.models import Model
from aquifer.models.collectives import Collectives


class TokenChoice:
    """Chooses the tokens of one model's steps.

    Args:
        model: the model.
        sampler: its sampler.
        collectives: the other ranks, which make the same calls.
    """

    def __init__(self, model: Model, sampler: Sampler, collectives: Collectives) -> None:
        self._model = model
        self._sampler = sampler
        self._collectives = collectives

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of all tokens: [n, hidden] -> [n, vocab]."""
        return self._whole(self._model.logits(hidden))

    def mode(self, mode: SamplingMode, *, needs_logits: bool) -> SamplingMode:
        """The least mode that does for these rows.

        Ranks sample from joined logits in full or penalized mode alone, so that they need compile
        no other kernels for that.

        Args:
            mode: what sampling needs.
            needs_logits: whether `choose` has to return the logits, or `sample` is given them.
        """
        if needs_logits and self._collectives.size > 1:
            return max(mode, SamplingMode.FULL)
        return mode

    def choose(
        self,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        out: torch.Tensor,
        mode: SamplingMode,
    ) -> torch.Tensor | None:
        """Choose a token for each row, without host synchronisation; the same on all ranks.

        Args:
            hidden: [n, hidden].
            slots: [n] int64, the slot of each row, -1 for rows that are left alone.
            num_tokens: [n] int64, tokens that the row's sequence has.
            out: [n] int64, overwritten but for rows that are left alone.
            mode: at least what any of the rows needs.

        Returns: the logits, [n, vocab], or None where they were not joined: see `mode`.
        """
        logits = self._model.logits(hidden)
        if self._collectives.size > 1 and mode <= SamplingMode.PLAIN:
            self._choose_apart(logits, slots, num_tokens, out, mode)
            return None
        logits = self._whole(logits)
        self.sample(logits, slots, num_tokens, out, mode)
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        out: torch.Tensor,
        mode: SamplingMode,
    ) -> None:
        """`choose` from logits of all tokens, [n, vocab].

        All ranks sample, from the same logits with the same random numbers; what counts are rank
        0's tokens.
        """
        self._sampler.sample(logits, slots, num_tokens, out, mode)
        self._collectives.agree(out)

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens from those of each rank; without padding."""
        if self._collectives.size == 1:
            return own
        return self._collectives.joined(own)[:, : self._model.vocab_size].contiguous()

    def _choose_apart(
        self,
        own: torch.Tensor,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        out: torch.Tensor,
        mode: SamplingMode,
    ) -> None:
        """Choose tokens from the logits of each rank, which stay there."""
        columns = self._sampler.columns
        part = VocabularyPart(
            self._collectives.rank, self._collectives.size, own.shape[1], self._model.vocab_size
        )
        is_greedy = mode is SamplingMode.GREEDY
        table = part.table(len(slots), own.device, is_greedy=is_greedy)
        summarise(own, part, slots, columns, table)
        (table,) = self._collectives.total(table)
        if is_greedy:
            choose(own, part, table, slots, num_tokens, columns, out)
            return
        tokens = torch.zeros(len(slots), device=own.device)
        choose(own, part, table, slots, num_tokens, columns, tokens)
        (tokens,) = self._collectives.total(tokens)
        torch.where(slots >= 0, tokens.long(), out, out=out)
