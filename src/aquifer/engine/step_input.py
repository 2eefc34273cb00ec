"""One step of one model as plain data: the scheduler's plan, and the runner's results.

Both directions are frozen values of arrays and numbers that pickle, so that the runner may be in
another process, and the same plan may go to every rank of a model that several devices share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aquifer.cache.journal import KVOp
from aquifer.cache.spans import IntArray, Spans
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A sequence that got a slot, with everything that sampling needs to know of it; sent once.

    `num_logprobs` and `num_prompt_logprobs` say how many of the most probable tokens to report at
    each position; None for no report.
    """

    slot: int
    seed: int  # uint64
    num_prompt_tokens: int
    least_context_tokens: int  # of `ModelInput.context_lengths`, for all tokens of the sequence
    min_total_tokens: int  # tokens before which no stop token counts, prompt included
    stop_ids: frozenset[int]
    params: SamplingParams
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    # [n] int32, the tokens known so far; empty unless penalties or prompt log probabilities need
    # them.
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """A planned step.

    A span is a stretch of a sequence's tokens. Spans that continue a sequence with the token that
    the device sampled itself come first, then other spans of one token, then longer ones.

    Where a step may bring several tokens of a sequence (`most_new > 1`), the host knows the length
    of a sequence that the device continues one step late. `spans` then has upper bounds, for which
    there is room, and the device's own columns have the true lengths. Each sampled span includes
    `most_new - 1` positions beyond its known tokens, for drafts.
    """

    model: str
    spans: Spans
    serials: IntArray  # [num_spans], the sequence of each span
    token_ids: npt.NDArray[np.int64]  # [num_tokens], -1 where the device knows it, or drafts it
    num_decodes: int  # spans, from the first, that begin with a token that the device sampled
    num_single: int  # spans, from the first, of one known token each, those included
    sampled: IntArray  # [m], indices of the spans that get new tokens
    # [m], the most tokens that each of these gets; 0 where the host chooses the token, given the
    # reported log probabilities (beam search).
    most_new: IntArray
    assigned: tuple[SlotAssignment, ...] = ()  # sequences that run in their slot for the first time
    # What happened to the KV cache's memory since the last step, where a journal is kept.
    kv_ops: tuple[KVOp, ...] = ()
    is_express: bool = False  # whether some clients' sequences sit it out


def _no_reports() -> dict[int, list[TokenLogprobs]]:
    return {}


def _no_prompt_reports() -> dict[tuple[int, int], TokenLogprobs]:
    return {}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step."""

    tokens: IntArray  # [m, k], new tokens of each sampled span, of which `counts` are valid
    counts: IntArray  # [m], from 0 to `StepInput.most_new`
    # By index into `tokens`, for the sequences that asked: an entry for each new token. Where the
    # host chooses the token, one entry, of the candidates.
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=_no_reports)
    # (index of a span, position of a prompt token) -> report, for the sequences that asked
    prompt_logprobs: Mapping[tuple[int, int], TokenLogprobs] = field(
        default_factory=_no_prompt_reports
    )

    @classmethod
    def of_single(cls, tokens: IntArray) -> StepOutput:
        """One new token for each sampled span, [m], and no reports."""
        return cls(tokens[:, None], np.ones(len(tokens), np.int64))
