"""The running sequences of one model, as arrays indexed by slot.

Everything that a step needs for each sequence is a column here, so that planning, running and
committing a step of hundreds of sequences is a handful of array operations and no Python loop.

For each slot whose sequence runs:  num_computed <= num_tokens <= max_total
    [0, num_computed)           is in the KV cache, once the steps in flight are done
    [num_computed, num_tokens)  is still to be run

A step counts as done when it is planned. So the last token may not be known yet: the step in flight
is to sample it, and the place in `token_ids` is filled in when it is committed. (The next token of
a beam depends on all beams, so that one is not counted before it is known.)

A sequence that waits for its parent (`Sequence.parent`) has num_computed = num_tokens = 0 here.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from aquifer.engine.sequence import Sequence, SequenceGroup

STOP_IDS_PER_SLOT = 16
"""Stop tokens that the array has room for; a request with more is checked one by one."""

_NEVER = np.iinfo(np.int64).max


class SlotTable:
    """Columns for up to `max_seqs` sequences of up to `max_tokens` tokens.

    Slots are numbered from 1; no sequence has slot 0 (`aquifer.cache.tensors.KVShape`).
    """

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        num_slots = max_seqs + 1
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.num_pending = 0  # seated sequences that wait for their parent
        # A heap: the lowest comes first, so that prompts admitted together are neighbours.
        self._free = list(range(1, num_slots))
        self._in_order: npt.NDArray[np.int64] | None = None  # until somebody comes or goes
        # Untouched parts of a fresh array of zeros take no memory.
        self.token_ids = np.zeros((num_slots, max_tokens), np.int32)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.max_total = np.zeros(num_slots, np.int64)
        self.min_total = np.zeros(num_slots, np.int64)  # no stop token among the first so many
        self.stop_ids = np.full((num_slots, STOP_IDS_PER_SLOT), -1, np.int64)
        self.serial = np.full(num_slots, -1, np.int64)  # of who has the slot, -1 for nobody
        # From this token on, the device knows each one before the host does.
        self.num_given = np.zeros(num_slots, np.int64)
        self.is_beam = np.zeros(num_slots, np.bool_)
        self.is_new = np.zeros(num_slots, np.bool_)  # no step has run since it got the slot
        self.choice = np.zeros(num_slots, np.int8)  # a `Choice`
        # Whether a step's output is more than a token: logprobs to report, many stop tokens.
        self.needs_care = np.zeros(num_slots, np.bool_)
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # -1 is none

    @property
    def num_free(self) -> int:
        """Slots that a sequence could take."""
        return len(self._free)

    @property
    def free(self) -> list[int]:
        """Those slots, in no order."""
        return self._free

    @property
    def num_taken(self) -> int:
        """Slots that sequences have."""
        return len(self.sequences) - 1 - len(self._free)

    @property
    def in_order(self) -> npt.NDArray[np.int64]:
        """The taken slots in the order of their sequences' arrival; not to be written to."""
        if self._in_order is None:
            taken = np.flatnonzero(self.serial >= 0)
            self._in_order = taken[np.argsort(self.serial[taken])]
            self._in_order.flags.writeable = False
        return self._in_order

    def seat(self, sequence: Sequence, slot: int | None = None) -> int:
        """Give a waiting sequence a slot, by default the lowest; nothing of it is computed yet."""
        if slot is None:
            slot = heapq.heappop(self._free)
        else:
            self._free.remove(slot)
            heapq.heapify(self._free)
        self._in_order = None
        sequence.slot = slot
        group, params = sequence.group, sequence.request.params
        self.sequences[slot] = sequence
        self.num_prompt[slot] = group.num_prompt_tokens
        self.num_tokens[slot] = self.num_computed[slot] = 0
        self.max_total[slot] = group.max_total
        self.min_total[slot] = group.num_prompt_tokens + params.min_tokens
        stop_ids = sorted(group.stop_ids)[:STOP_IDS_PER_SLOT]
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.serial[slot] = sequence.serial
        self.is_beam[slot] = group.beams is not None
        self.choice[slot] = sequence.choice
        num_logprobs = sequence.num_logprobs
        self.num_logprobs[slot] = -1 if num_logprobs is None else num_logprobs
        self.needs_care[slot] = (
            num_logprobs is not None
            or params.prompt_logprobs is not None
            or len(group.stop_ids) > STOP_IDS_PER_SLOT
        )
        return slot

    def begin(self, sequence: Sequence, num_computed: int = 0) -> None:
        """Let a seated sequence run, from the first token that is not computed on."""
        slot = sequence.slot
        assert slot is not None
        count = len(sequence.token_ids)
        self.token_ids[slot, :count] = sequence.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = num_computed
        # Which beam goes on with which token is decided on the host.
        self.num_given[slot] = _NEVER if self.is_beam[slot] else count
        self.is_new[slot] = True

    def set_parent(self, sequence: Sequence, parent: Sequence | None) -> None:
        """Let a seated sequence wait for another one, or no longer."""
        self.num_pending += (parent is not None) - (sequence.parent is not None)
        sequence.parent = parent

    def tokens(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """All known tokens of a seated sequence; a view."""
        slot = sequence.slot
        assert slot is not None
        if self.num_tokens[slot] == 0:  # it has not begun in this slot
            return sequence.token_ids
        return self.token_ids[slot, : self.num_tokens[slot]]

    def count_tokens(self, group: SequenceGroup) -> int:
        """Known tokens of all sequences of a seated group that run or will."""
        return sum(len(self.tokens(sequence)) for sequence in group.live)

    def unseat(self, sequence: Sequence) -> None:
        """Take the slot back; the sequence keeps its tokens."""
        slot = sequence.slot
        assert slot is not None
        sequence.token_ids = self.tokens(sequence).copy()
        self.set_parent(sequence, None)
        self._in_order = None
        sequence.slot = None
        self.sequences[slot] = None
        self.serial[slot] = -1
        heapq.heappush(self._free, slot)
