"""Columns of the running sequences of one model: arrays indexed by slot.

Everything that planning and committing a step needs of a sequence is a column here, so that a step
of hundreds of sequences is a few array operations and no Python loop. Only the scheduler writes to
them.

For each slot with a running sequence:

    num_known <= num_tokens <= max_total        num_computed <= num_tokens
    [0, num_known)              tokens that the host knows
    [num_known, num_tokens)     tokens that the steps in flight bring at most
    [0, num_computed)           KV in the cache once the steps in flight are done, at most
    [num_computed, num_tokens)  still to be run

A step counts as done when it is planned, with the most new tokens that it may bring. When it is
committed, the tokens are filled in, and what it brought less is subtracted again. A sequence that
the device continues by itself always has num_computed = num_tokens - 1: its last token is run next.

A sequence that waits for its parent (`Sequence.parent`) has num_computed = num_tokens = 0 here.
"""

from __future__ import annotations

from bisect import insort
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aquifer.engine.sequence import Sequence, SequenceGroup

STOP_IDS_PER_SLOT = 16
"""Stop tokens in the column of a slot; further ones of a request are checked one by one."""

NEVER = int(np.iinfo(np.int64).max)
"""A number of tokens that no sequence has."""


class SlotTable:
    """Columns for up to `max_seqs` sequences of up to `max_tokens` tokens.

    Slots are numbered from 1; slot 0 is never assigned (`aquifer.cache.tensors.KVShape`).

    Args:
        max_seqs: sequences that have a slot at the same time.
        max_tokens: length of the longest sequence.
        most_new: the most new tokens that a step brings to a sequence.
        num_spare: slots beyond those, so that there is a choice for the next sequence.
        kv_limits: see `ModelPlan.kv_limits`; none where a step may bring several tokens.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        most_new: int = 1,
        num_spare: int = 0,
        kv_limits: tuple[int, ...] = (),
    ) -> None:
        assert most_new == 1 or not kv_limits, "a draft could lie beyond a limit"
        num_slots = max_seqs + num_spare + 1
        self.max_seqs = max_seqs
        self._num_spare = num_spare
        self.drafts = most_new > 1  # whether a step may bring several tokens of a sequence
        self._most_new = most_new
        self.kv_limits = tuple(limit for limit in kv_limits if limit < max_tokens)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.num_pending = 0  # sequences with a slot that wait for their parent
        self._free = list(range(1, num_slots))  # ascending
        self._in_order: npt.NDArray[np.int64] | None = None  # None once a slot changed hands
        # Untouched parts of a fresh array of zeros take no memory.
        self.token_ids = np.zeros((num_slots, max_tokens), np.int32)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.num_known = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.max_total = np.zeros(num_slots, np.int64)
        # What is known of `max_total` beforehand; memory is planned by it.
        self.limit_total = np.zeros(num_slots, np.int64)
        self.min_total = np.zeros(num_slots, np.int64)  # tokens before which no stop token counts
        self.stop_ids = np.full((num_slots, STOP_IDS_PER_SLOT), -1, np.int64)
        self.serial = np.full(num_slots, -1, np.int64)  # the sequence's number; -1: a free slot
        self.client = np.zeros(num_slots, np.int64)  # number of the client that it is for
        # Position from which on the device knows each token before the host does.
        self.num_given = np.zeros(num_slots, np.int64)
        # The most new tokens of a step; 0 where the host chooses the next token (beam search).
        self.most_new = np.zeros(num_slots, np.int64)
        # The most tokens for which the KV of the sequence is valid; see `kv_limit_of`.
        self.kv_limit = np.full(num_slots, NEVER)
        # Tokens at which a step of the sequence ends once, so that its state can be copied.
        self.stop_at = np.full(num_slots, NEVER)
        self.is_new = np.zeros(num_slots, np.bool_)  # no step has run since it got the slot
        # Whether an output may need more than its tokens: reports, or a look at many stop tokens.
        self.is_special = np.zeros(num_slots, np.bool_)

    @property
    def num_free(self) -> int:
        """Number of sequences that can get a slot."""
        return len(self._free) - self._num_spare

    @property
    def free(self) -> list[int]:
        """The free slots, ascending."""
        return self._free

    @property
    def num_taken(self) -> int:
        """Number of slots in use."""
        return self.max_seqs - self.num_free

    @property
    def in_order(self) -> npt.NDArray[np.int64]:
        """The slots in use, in order of their sequences' arrival; read-only."""
        if self._in_order is None:
            taken = (self.serial >= 0).nonzero()[0]
            self._in_order = taken[self.serial[taken].argsort()]
            self._in_order.flags.writeable = False
        return self._in_order

    def assign(self, sequence: Sequence, slot: int | None = None) -> int:
        """Give a waiting sequence a slot; nothing of it is computed yet.

        Prompts that are admitted together should be neighbours, since attention computes them
        together then. So by default it is the lowest slot before another free one.
        """
        if slot is None:
            slot = next(
                (first for first, second in pairwise(self._free) if second == first + 1),
                self._free[0],
            )
        self._free.remove(slot)
        self._in_order = None
        sequence.slot = slot
        group, params = sequence.group, sequence.request.params
        self.sequences[slot] = sequence
        self.num_prompt[slot] = group.num_prompt_tokens
        self.num_known[slot] = self.num_tokens[slot] = self.num_computed[slot] = 0
        self.max_total[slot] = group.max_total
        self.limit_total[slot] = group.limit_total
        self.min_total[slot] = group.num_prompt_tokens + params.min_tokens
        stop_ids = sorted(group.stop_ids)[:STOP_IDS_PER_SLOT]
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.serial[slot] = sequence.serial
        self.client[slot] = group.client
        # A sequence with logits that the host changes or reports gets one token a step.
        single = 1 if sequence.needs_logits else self._most_new
        self.most_new[slot] = 0 if group.beams is not None else single
        self.is_special[slot] = (
            sequence.num_logprobs is not None
            or params.prompt_logprobs is not None
            or len(group.stop_ids) > STOP_IDS_PER_SLOT
        )
        return slot

    def begin(self, sequence: Sequence, num_computed: int = 0) -> None:
        """Start a sequence in its slot, at the first token that is not computed."""
        slot = sequence.slot
        assert slot is not None
        count = len(sequence.token_ids)
        self.token_ids[slot, :count] = sequence.token_ids
        self.num_known[slot] = self.num_tokens[slot] = count
        self.num_computed[slot] = num_computed
        self.num_given[slot] = count if self.most_new[slot] else NEVER
        self.kv_limit[slot] = self.kv_limit_of(count)
        self.stop_at[slot] = NEVER
        self.is_new[slot] = True

    def kv_limit_of(self, num_tokens: int) -> int:
        """The most tokens for which KV is valid that is computed for a sequence of `num_tokens`."""
        return next((limit for limit in self.kv_limits if num_tokens <= limit), NEVER)

    def have_outgrown(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each sequence has to run a token that its KV is not valid for."""
        runnable = np.minimum(self.num_tokens[slots], self.max_total[slots] - 1)
        return runnable > self.kv_limit[slots]

    def least_context(self, slot: int) -> int:
        """The least context length that the tokens of a slot's sequence are computed for: that of
        its prompt, or of the shortest sequence that has the same KV."""
        outgrown = [limit + 1 for limit in self.kv_limits if limit < self.kv_limit[slot]]
        return max([int(self.num_prompt[slot]), *outgrown])

    def append(self, slot: int, token_id: int) -> None:
        """Add a token that the host has chosen, for a sequence with `most_new` 0."""
        self.token_ids[slot, self.num_known[slot]] = token_id
        self.num_known[slot] += 1
        self.num_tokens[slot] += 1

    def clear(self, slot: int) -> None:
        """Reset the progress of a slot's sequence, which keeps the slot."""
        self.num_known[slot] = self.num_tokens[slot] = self.num_computed[slot] = 0

    def set_parent(self, sequence: Sequence, parent: Sequence | None) -> None:
        """Make a sequence in its slot wait for a parent, or stop waiting with None."""
        self.num_pending += (parent is not None) - (sequence.parent is not None)
        sequence.parent = parent

    def tokens(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """All known tokens of a sequence that has a slot; a view."""
        slot = sequence.slot
        assert slot is not None
        if self.num_tokens[slot] == 0:  # it has not begun in this slot
            return sequence.token_ids
        return self.token_ids[slot, : self.num_known[slot]]

    def count_tokens(self, group: SequenceGroup) -> int:
        """Known tokens of all live sequences of a group, all of which have slots."""
        return sum(len(self.tokens(sequence)) for sequence in group.live)

    def release(self, sequence: Sequence) -> None:
        """Take the slot back; the sequence keeps its known tokens."""
        slot = sequence.slot
        assert slot is not None
        sequence.token_ids = self.tokens(sequence).copy()
        self.set_parent(sequence, None)
        self._in_order = None
        sequence.slot = None
        self.sequences[slot] = None
        self.serial[slot] = -1
        insort(self._free, slot)
