"""Beam search: which continuations of a prompt go on, and which are done (PagedAttention, 4.4).

Pure bookkeeping: it sees token ids and log probabilities. The engine runs the live beams, tells
what may follow each, and then forks, goes on with and drops their KV as it is told. Tokens, their
order and scores are those of Transformers' `generate(num_beams=width, do_sample=False)`, for which
sums and quotients are taken in float32 and in its order. Its rules:

- Continuations of all live beams are ranked by the sum of their log probabilities.
- One that ends with an EOS token is finished, but only if it is among the best `width` of that
  ranking; at the most tokens there may be, the best `width` are finished whatever they end with.
- The best `width` of those that do not end with an EOS token are the next live beams.
- Of the finished ones the best `width` are kept, by score: the sum over (tokens ** penalty).
- It is over at the most tokens; or when `width` are finished, and none that lives seems able to
  get a better score than the worst of them.

Where values are exactly equal, Transformers leaves the order to `topk`. Here the better parent
comes first, and the continuation that the engine gave first; of finished ones the older.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aquifer.engine.request import FinishReason

EarlyStopping = bool | Literal["never"]

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion that a search found."""

    token_ids: list[int]  # of the output, with the token that ended it
    cumulative_logprob: float
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: FinishReason  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished sequence: a live beam, by its place in the history, and one more token."""

    num_tokens: int
    parent: int
    token_id: int
    logprob: np.float32
    score: np.float32


class BeamSearch:
    """The search for one prompt's most probable completions.

    Args:
        width: beams, at least 1. A single one is greedy search, as in Transformers: it is over at
            its first EOS token, whatever `early_stopping` is.
        num_returned: completions that `results` gives; at most `width`.
        max_new_tokens: the most tokens of a completion, at least 1.
        eos_ids: tokens that end a completion.
        length_penalty: the power of the length that sums are divided by. As sums are negative, a
            positive one favours long completions.
        early_stopping: when `width` completions are finished, go on no more (True); go on while
            the best live beam's score, if it ended now, is better than the worst of them (False);
            or while its score could be that at the length that suits it best ("never").
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
        # The live beams, best first: the prompt. All have equally many tokens.
        self._logprobs = np.zeros(1, np.float32)
        # What they grew from. Entry i has, of each beam that lived when there were i + 1 tokens,
        # its token i and the place of its first i tokens in the entry before.
        self._parents: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._finished: list[_Finished] = []  # best first, at most `width`
        self._is_over = False

    @property
    def num_candidates(self) -> int:
        """The continuations to report for each live beam, or the whole vocabulary if it has fewer.

        That many hold `width` that do not end it, even if each EOS token comes before them, so no
        beam's report misses any of the `width` best of all beams.
        """
        return self._width + len(self._eos_ids)

    @property
    def num_live(self) -> int:
        """Live beams; 1 before the first step, which is the prompt's, and 0 at the end."""
        return len(self._logprobs)

    @property
    def finished(self) -> bool:
        """Whether the search is over."""
        return self._is_over

    def advance(
        self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> list[tuple[int, int]]:
        """Take the search one token further.

        Args:
            token_ids: of each live beam the most probable next tokens, best first,
                [num_live, num_candidates].
            logprobs: of these tokens, [num_live, num_candidates], float32.

        Returns:
            The next live beams, best first, as (index of the parent among the live ones, token
            id); empty when the search is over. There are `width`, or fewer where the vocabulary is
            too small for that.
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
        """The best completions, best first, once the search is over.

        There are `num_returned`, unless the vocabulary is too small for so many.
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
        """Keep the sequences if they are among the best that are finished."""
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
        """Whether a live beam may still get among the finished ones."""
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
        """What penalises the length; kept within float32, so that quotients are numbers."""
        try:
            power = float(num_tokens) ** self._length_penalty
        except OverflowError:
            power = float(_FLOAT32.max)
        return np.float32(min(max(power, float(_FLOAT32.tiny)), float(_FLOAT32.max)))

    def _trace(self, num_tokens: int, beam: int) -> list[int]:
        """The tokens of the beam that had this index when there were so many."""
        token_ids = []
        for index in reversed(range(num_tokens)):
            token_ids.append(int(self._tokens[index][beam]))
            beam = int(self._parents[index][beam])
        return token_ids[::-1]
