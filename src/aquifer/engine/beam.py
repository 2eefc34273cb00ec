"""Beam search: beams that continue, and beams that are finished (PagedAttention, 4.4).

Pure bookkeeping over token ids and log probabilities. The engine runs the live beams, reports the
candidates for each, and then forks, continues or releases their KV as the search decides. Tokens,
their order and scores equal Transformers' `generate(num_beams=width, do_sample=False)`; to that
end sums and quotients are computed in float32 and in its order. Its rules:

- Continuations of all live beams are ranked by the sum of their log probabilities.
- A continuation that ends with an EOS token is finished if it is among the best `width` of that
  ranking. At the maximum length the best `width` are finished, with any last token.
- The best `width` continuations that do not end with an EOS token are the next live beams.
- The best `width` finished beams are kept, by score: sum / (tokens ** penalty).
- The search ends at the maximum length, or when `width` beams are finished and no live beam seems
  able to score better than the worst of them.

Where values are exactly equal, Transformers leaves the order to `topk`. Here the better parent
comes first, then the candidate that the engine listed first; among finished beams the older.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aquifer.engine.outputs import FinishReason

EarlyStopping = bool | Literal["never"]

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion found by the search."""

    token_ids: list[int]  # the output's, including the token that ended it
    cumulative_logprob: float
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: FinishReason  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished beam: a live beam, by its index in the history, and one more token."""

    num_tokens: int
    parent: int
    token_id: int
    logprob: np.float32
    score: np.float32


class BeamSearch:
    """Beam search for the most probable completions of one prompt.

    Args:
        width: number of beams, at least 1. One beam is greedy search, as in Transformers: it ends
            at its first EOS token, for any `early_stopping`.
        num_returned: completions that `results` returns; at most `width`.
        max_new_tokens: maximum length of a completion, at least 1.
        eos_ids: tokens that end a completion.
        length_penalty: sums are divided by length to this power. As sums are negative, a positive
            value favours long completions.
        early_stopping: when to end once `width` completions are finished. True: at once. False:
            when the best live beam, if it ended now, would not score better than the worst of
            them. "never": when it could not even at its most favourable length.
    """

    def __init__(
        self,
        width: int,
        num_returned: int,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
    ) -> None:
        self._width = width
        self._num_returned = num_returned
        self._max_new_tokens = max_new_tokens
        self._eos_ids = np.array(sorted(eos_ids), np.int64)
        self._length_penalty = length_penalty
        self._early_stopping: EarlyStopping = True if width == 1 else early_stopping
        # Live beams, best first; at first the prompt alone. All have the same length.
        self._logprobs = np.zeros(1, np.float32)
        # History. Entry i describes the beams that were live at i + 1 tokens: the token i of
        # each, and the index of its parent in entry i - 1.
        self._parents: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._finished: list[_Finished] = []  # best first, at most `width`
        self._is_over = False

    @property
    def num_candidates(self) -> int:
        """Candidates to report for each live beam; the whole vocabulary if that is smaller.

        Even if every EOS token ranks first, `width` candidates remain that do not end the beam, so
        none of the `width` best of all beams can be missing.
        """
        return self._width + len(self._eos_ids)

    @property
    def num_live(self) -> int:
        """Number of live beams; 1 before the first step (the prompt), 0 at the end."""
        return len(self._logprobs)

    @property
    def finished(self) -> bool:
        """Whether the search is over."""
        return self._is_over

    def advance(
        self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> list[tuple[int, int]]:
        """Advance the search by one token.

        Args:
            token_ids: the most probable next tokens of each live beam, best first,
                [num_live, num_candidates].
            logprobs: their log probabilities, [num_live, num_candidates], float32.

        Returns:
            The next live beams, best first, as (index of the parent among the live beams, token
            id); empty when the search is over. There are `width`, or fewer if the vocabulary is
            too small.
        """
        assert not self._is_over
        assert token_ids.shape == logprobs.shape
        assert len(token_ids) == self.num_live
        sums = (self._logprobs[:, None] + logprobs.astype(np.float32, copy=False)).ravel()
        ranking = np.argsort(-sums, kind="stable")  # indices into all candidates, best first
        parents, tokens = ranking // token_ids.shape[1], token_ids.ravel()[ranking]
        sums = sums[ranking]
        is_end = np.isin(tokens, self._eos_ids)
        num_tokens = len(self._tokens) + 1
        at_limit = num_tokens == self._max_new_tokens

        ending = np.flatnonzero(is_end[: self._width] | at_limit)
        self._finish(num_tokens, parents[ending], tokens[ending], sums[ending])
        going_on = np.flatnonzero(~is_end)[: self._width]
        self._is_over = (
            at_limit or not len(going_on) or not self._can_improve(num_tokens, sums[going_on[0]])
        )
        if self._is_over:
            going_on = going_on[:0]
        self._logprobs = sums[going_on]
        self._parents.append(parents[going_on])
        self._tokens.append(tokens[going_on])
        return list(zip(self._parents[-1].tolist(), self._tokens[-1].tolist(), strict=True))

    def results(self) -> list[Hypothesis]:
        """Return the best completions, best first. Pre-condition: the search is over.

        There are `num_returned`, or fewer if the vocabulary is too small.
        """
        assert self._is_over
        ends = frozenset(self._eos_ids.tolist())
        return [
            Hypothesis(
                token_ids=[*self._trace(kept.num_tokens - 1, kept.parent), kept.token_id],
                cumulative_logprob=float(kept.logprob),
                score=float(kept.score),
                finish_reason="stop" if kept.token_id in ends else "length",
            )
            for kept in self._finished[: self._num_returned]
        ]

    def _finish(
        self,
        num_tokens: int,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Add finished beams and keep the best `width`."""
        if not len(tokens):
            return
        scores = logprobs / self._divisor(num_tokens)
        self._finished += [
            _Finished(num_tokens, parent, token, logprob, score)
            for parent, token, logprob, score in zip(
                parents.tolist(), tokens.tolist(), logprobs, scores, strict=True
            )
        ]
        self._finished.sort(key=lambda one: -one.score)  # stable
        del self._finished[self._width :]

    def _can_improve(self, num_tokens: int, best_logprob: np.float32) -> bool:
        """Whether a live beam may still score better than a finished one."""
        if len(self._finished) < self._width:
            return True
        if self._early_stopping == "never":
            if self._length_penalty > 0:
                num_tokens = self._max_new_tokens
        elif self._early_stopping:
            return False
        best_score = best_logprob / self._divisor(num_tokens)
        return bool(best_score > self._finished[-1].score)

    def _divisor(self, num_tokens: int) -> np.float32:
        """The divisor of scores, clamped to the range of float32 so that scores are finite."""
        try:
            power = float(num_tokens) ** self._length_penalty
        except OverflowError:
            power = float(_FLOAT32.max)
        return np.float32(min(max(power, float(_FLOAT32.tiny)), float(_FLOAT32.max)))

    def _trace(self, num_tokens: int, beam: int) -> list[int]:
        """Return the tokens of the beam that had index `beam` at length `num_tokens`."""
        token_ids = []
        for index in reversed(range(num_tokens)):
            token_ids.append(int(self._tokens[index][beam]))
            beam = int(self._parents[index][beam])
        return token_ids[::-1]
