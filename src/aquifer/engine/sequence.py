"""Sequences: what runs for a request, one sequence of tokens or a group of several.

The sequences of a group share the KV of the prompt, are admitted together, and are preempted
together (PagedAttention, section 4.5).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aquifer.cache.prefix import Lease, Match
from aquifer.cache.swap import SwappedKV
from aquifer.engine.beam import BeamSearch
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.params import MAX_SEQUENCES, Request
from aquifer.predict.forecaster import Outlook

TokenIds = npt.NDArray[np.int32]

_SEED_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of a group's sequences; large, as users often count seeds by 1."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion, or one beam, waiting or running; it outlives its slot when it is preempted.

    `token_ids` is valid only while it does not run in a slot; then the slot's table has the tokens.
    A sequence in a slot with a `parent` does not run yet: it will share the first `fork_tokens`
    tokens of its parent, as soon as those are computed.
    """

    group: SequenceGroup
    index: int  # within the group
    token_ids: TokenIds  # all known tokens
    slot: int | None = None
    parent: Sequence | None = None
    fork_tokens: int = 0
    swapped: SwappedKV | None = None  # its KV on the host, if it was moved there
    lease: Lease | None = None  # guard of its blocks in the prefix cache
    has_output: bool = False
    num_begun_with: int = 0  # tokens that it had at its last admission
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def request(self) -> Request:
        """The request that the sequence runs for."""
        return self.group.request

    @property
    def serial(self) -> int:
        """Number among all sequences of the engine, in order of arrival, then of index."""
        return self.group.arrival * MAX_SEQUENCES + self.index

    @property
    def seed(self) -> int:
        """Seed of its random numbers; the first sequence has the request's own."""
        return (self.group.seed + self.index * _SEED_STEP) % 2**64

    @property
    def needs_logits(self) -> bool:
        """Whether its logits are changed or reported one token at a time."""
        params = self.request.params
        return params.changes_logits or params.min_tokens > 0 or self.num_logprobs is not None

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens to report with each new token; None for no report."""
        params, beams = self.request.params, self.group.beams
        if beams is not None:
            return beams.search.num_candidates
        if params.logprobs is None and params.num_sequences > params.n:
            return 0  # only those of the chosen tokens, to rank completions
        return params.logprobs


@dataclass(slots=True)
class Beams:
    """A beam search in progress."""

    search: BeamSearch
    live: list[Sequence]  # in the order of the search
    # Candidates for the next token of each live beam; the first entry has no meaning.
    candidates: dict[Sequence, TokenLogprobs] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request in the engine.

    Attributes:
        outlook: what is expected of its length; None if lengths are not predicted.
        client: number of the client that it is for.
        sequences: sequences that have not ended. A beam search has one for each of its beams, also
            when fewer beams are live.
        begins_anew: whether it was or will be admitted alone, to a pool without retained KV. So its
            blocks lie side by side; before, they were scattered over more pages than they need,
            since others ran beside it or KV was retained between them.
    """

    request: Request
    arrival: int  # number in the order of arrival
    seed: int
    max_total: int  # tokens, prompt included, at which a sequence ends
    limit_total: int  # the same, as far as it is known beforehand: not less
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    outlook: Outlook | None = None
    client: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    beams: Beams | None = None
    match: Match | None = None  # retained KV found at the last attempt to admit it
    num_cached_tokens: int | None = None  # prompt tokens that were cached; None before admission
    num_preemptions: int = 0
    begins_anew: bool = False
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        arrival: int,
        prompt: TokenIds,
        *,
        seed: int,
        max_total: int,
        limit_total: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
        eos_ids: frozenset[int] = frozenset(),
    ) -> SequenceGroup:
        """Make a waiting group.

        Args:
            request: the request.
            arrival: its number in the order of arrival.
            prompt: the request's tokens as an array.
            seed: seed of its random numbers.
            max_total: tokens, prompt included, at which a sequence ends.
            limit_total: what is known of that beforehand, if less is known than it is: in a replay
                of requests that do not state their lengths.
            stop_ids: tokens that end a sequence, `eos_ids` included unless they are ignored.
            eos_ids: the model's own end-of-sequence tokens.
        """
        params = request.params
        group = cls(request, arrival, seed, max_total, limit_total or max_total, stop_ids, eos_ids)
        group.sequences = [Sequence(group, i, prompt) for i in range(params.num_sequences)]
        if params.prompt_logprobs is not None:
            group.sequences[0].prompt_logprobs = [None] * len(prompt)
        if params.use_beam_search:
            search = BeamSearch(
                params.num_sequences,
                params.n,
                max_total - len(prompt),
                stop_ids,
                params.length_penalty,
                params.early_stopping,
            )
            group.beams = Beams(search, group.sequences[:1])
        return group

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def live(self) -> list[Sequence]:
        """The sequences that run, now or later: in a beam search, those of live beams."""
        return self.sequences if self.beams is None else self.beams.live

    @property
    def is_swapped(self) -> bool:
        """Whether its KV is on the host."""
        return any(sequence.swapped is not None for sequence in self.sequences)

    @property
    def reads_prefixes(self) -> bool:
        """Whether it may use cached KV: not if it needs log probabilities of prompt tokens."""
        return self.request.params.prompt_logprobs is None
