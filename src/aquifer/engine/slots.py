"""The running sequences of one model, as arrays indexed by slot.

Everything that a step needs for each sequence is a column here, so that planning, running and
committing a step of hundreds of sequences is a handful of array operations and no Python loop.

For each running slot:  num_computed <= num_tokens <= max_total
    [0, num_computed)           is in the KV cache, once the steps in flight are done
    [num_computed, num_tokens)  is still to be run

A step counts as done when it is planned. So the last token may not be known yet: the step in flight
is to sample it, and the place in `token_ids` is filled in when it is committed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from aquifer.engine.request import Request, TokenLogprobs

STOP_IDS_PER_SLOT = 16
"""Stop tokens that the array has room for; a request with more is checked one by one."""


class Choice(IntEnum):
    """How a sequence's tokens are chosen; each kind of step can do what those below it can."""

    GREEDY = 0
    PLAIN = 1  # by temperature alone
    FULL = 2  # with penalties, top-k, top-p or min-p
    OWN = 3  # with changes to its logits that are its own business, or a report of them


@dataclass(slots=True)
class Sequence:
    """A request in the engine, waiting or running; it outlives its slot when it is preempted.

    `token_ids` and `num_tokens` are kept here only while it has no slot.
    """

    request: Request
    arrival: int  # order of arrival among all requests of the engine
    seed: int
    max_total: int  # tokens, prompt included, at which it ends
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    token_ids: npt.NDArray[np.int32]  # all known tokens
    slot: int | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens that it has had matter for the next."""
        params = self.request.params
        return (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )

    @property
    def choice(self) -> Choice:
        """What its parameters ask of the sampler."""
        params = self.request.params
        if (
            params.min_tokens > 0
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.logprobs is not None
        ):
            return Choice.OWN
        if self.has_penalties or params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            return Choice.FULL
        return Choice.PLAIN if params.temperature > 0 else Choice.GREEDY


class SlotTable:
    """Columns for up to `max_seqs` sequences of up to `max_tokens` tokens."""

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_seqs
        # A heap: the lowest comes first, so that prompts admitted together are neighbours.
        self._free = list(range(max_seqs))
        # Untouched parts of a fresh array of zeros take no memory.
        self.token_ids = np.zeros((max_seqs, max_tokens), np.int32)
        self.num_prompt = np.zeros(max_seqs, np.int64)
        self.num_tokens = np.zeros(max_seqs, np.int64)
        self.num_computed = np.zeros(max_seqs, np.int64)
        self.max_total = np.zeros(max_seqs, np.int64)
        self.min_total = np.zeros(max_seqs, np.int64)  # no stop token among the first so many
        self.stop_ids = np.full((max_seqs, STOP_IDS_PER_SLOT), -1, np.int64)
        self.arrival = np.full(max_seqs, -1, np.int64)  # of who has the slot, -1 for nobody
        self.num_seated = np.zeros(max_seqs, np.int64)  # tokens known when it got the slot
        self.choice = np.zeros(max_seqs, np.int8)  # a `Choice`
        # Whether a step's output is more than a token: logprobs to report, many stop tokens.
        self.needs_care = np.zeros(max_seqs, np.bool_)
        self.num_logprobs = np.full(max_seqs, -1, np.int64)  # -1 is none

    @property
    def num_free(self) -> int:
        """Slots that a sequence could take."""
        return len(self._free)

    def seat(self, sequence: Sequence) -> int:
        """Give a waiting sequence a slot; nothing of it is computed yet."""
        slot = sequence.slot = heapq.heappop(self._free)
        params = sequence.request.params
        count = len(sequence.token_ids)
        self.sequences[slot] = sequence
        self.token_ids[slot, :count] = sequence.token_ids
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.num_tokens[slot] = count
        self.num_computed[slot] = 0
        self.max_total[slot] = sequence.max_total
        self.min_total[slot] = sequence.num_prompt_tokens + params.min_tokens
        stop_ids = sorted(sequence.stop_ids)[:STOP_IDS_PER_SLOT]
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.arrival[slot] = sequence.arrival
        self.num_seated[slot] = count
        self.choice[slot] = sequence.choice
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.needs_care[slot] = (
            params.logprobs is not None
            or params.prompt_logprobs is not None
            or len(sequence.stop_ids) > STOP_IDS_PER_SLOT
        )
        return slot

    def unseat(self, sequence: Sequence) -> None:
        """Take the slot back; the sequence keeps its tokens."""
        slot = sequence.slot
        assert slot is not None
        sequence.token_ids = self.token_ids[slot, : self.num_tokens[slot]].copy()
        sequence.slot = None
        self.sequences[slot] = None
        self.arrival[slot] = -1
        heapq.heappush(self._free, slot)
