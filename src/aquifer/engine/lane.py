"""Lane: a model's requests, and the slots, KV and retained prefixes of their sequences."""

from __future__ import annotations

import collections.abc
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from aquifer.cache.base import IntArray, SequenceCache
from aquifer.cache.journal import KVOp
from aquifer.cache.prefix import PrefixCache
from aquifer.engine.costs import PrefillCost
from aquifer.engine.forecasts import SlotForecasts
from aquifer.engine.queue import Queue
from aquifer.engine.sequence import Sequence, SequenceGroup
from aquifer.engine.slots import NEVER, SlotTable
from aquifer.engine.step_input import StepInput
from aquifer.errors import DriverError
from aquifer.memory.runs import num_equal
from aquifer.predict.ended import EndedOutput
from aquifer.predict.forecaster import Forecaster
from aquifer.predict.lengths import Forecast


@dataclass(slots=True, eq=False)
class Lane:
    """One model's requests, waiting and running, with the resources of their sequences.

    The methods are the steps of a sequence's life in a slot. They keep the books of one model and
    make no decisions.

    Attributes:
        prefixes: cache of the KV of earlier requests; None if it is not kept.
        forecaster: forecasts the lengths of outputs; None if they are not predicted.
        tells_cache: whether the cache's manager gets the forecasts.
        recompute_s: seconds to compute a stretch of KV, given its first position and its length.
        captured_sizes: numbers of tokens for which its steps are captured, ascending.
        is_resident: whether the model's weights are there; else nothing of it is planned.
        is_planned: whether its next step is being planned.
        keeps_journal: whether what happens to the KV cache's memory goes along with each step, for
            a runner in another process.
        running: by arrival.
        forecasts: forecasts of the running sequences.
        in_flight: plans that are neither committed nor dropped, the earliest first.
        ended: outputs that have ended and are yet to be learnt from, together with those of other
            devices; None where they are learnt from at once.
        has_windows: whether KV behind the windows of some layers is given back.
        has_state: whether sequences have recurrent state, which is that after their latest token.
    """

    name: str
    cache: SequenceCache
    slots: SlotTable
    prefixes: PrefixCache | None = None
    forecaster: Forecaster | None = None
    tells_cache: bool = True
    recompute_s: Callable[[float, float], float] = PrefillCost().seconds
    captured_sizes: tuple[int, ...] = ()
    is_resident: bool = True
    is_planned: bool = False
    keeps_journal: bool = False
    waiting: Queue = field(default_factory=Queue)
    running: list[SequenceGroup] = field(default_factory=list)
    in_flight: deque[StepInput] = field(default_factory=deque)
    last_turn: int = -1
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that swapped
    ended: list[EndedOutput] | None = None
    output_tokens: float = 0.0  # moving average of the outputs that have ended by themselves
    forecasts: SlotForecasts = field(init=False)
    has_windows: bool = field(init=False)
    has_state: bool = field(init=False)
    _stops: dict[int, list[int]] = field(init=False, default_factory=dict)  # of each slot

    def __post_init__(self) -> None:
        self.forecasts = SlotForecasts(len(self.slots.sequences))
        self.has_windows = any(part.window_tokens is not None for part in self.cache.parts)
        self.has_state = any(part.keeps_state for part in self.cache.parts)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @contextmanager
    def being_planned(self) -> Iterator[None]:
        """While its next step is planned, its weights stay."""
        self.is_planned = True
        try:
            yield
        finally:
            self.is_planned = False

    @property
    def is_busy(self) -> bool:
        """Whether any request is running, or a step is planned or in flight."""
        return bool(self.running or self.in_flight or self.is_planned)

    @property
    def written_tokens(self) -> IntArray:
        """Tokens of each slot's sequence that were written to the cache, [slots]; shared ones count
        for each."""
        return np.where(self.slots.serial >= 0, self.slots.num_computed, 0)

    def take_journal(self) -> tuple[KVOp, ...]:
        """What happened to the KV cache's memory since the last call, where a journal is kept."""
        return self.cache.tensors.take_journal() if self.keeps_journal else ()

    # --- slots -------------------------------------------------------------------------------

    def forecast(self, group: SequenceGroup) -> Forecast | None:
        """The present forecast of a request's outputs; None if there is none."""
        if self.forecaster is None or group.outlook is None:
            return None
        return self.forecaster.forecast(group.outlook)

    def assign_slot(self, sequence: Sequence, blocks: collections.abc.Sequence[int] = ()) -> int:
        """Give a waiting sequence a slot, and tell the cache its length.

        Args:
            sequence: the sequence.
            blocks: blocks that it will adopt.
        """
        preferred = self.cache.preferred_slot(blocks, self.slots.free)
        slot = self.slots.assign(sequence, preferred)
        group = sequence.group
        self.forecasts.set(slot, self.forecast(group))
        num_tokens = len(sequence.token_ids)
        self.cache.expect(slot, num_tokens, group.limit_total, self.told(sequence))
        return slot

    def told(self, sequence: Sequence) -> Forecast | None:
        """The forecast of a waiting sequence that the cache's manager gets; None for none."""
        group = sequence.group
        forecast = self.forecast(group)
        if not self.tells_cache or forecast is None or group.begins_anew:
            return None
        return forecast.after(len(sequence.token_ids) - group.num_prompt_tokens)

    def release_slot(self, sequence: Sequence, now_s: float | None) -> None:
        """Take a sequence's slot and memory; its KV is retained if prefixes are cached.

        Args:
            sequence: the sequence; without a slot, nothing happens.
            now_s: the time; None if its KV is not to be retained.
        """
        if sequence.slot is None:
            return
        self.unlock(sequence, now_s)
        self.cache.release(sequence.slot)
        self.slots.release(sequence)

    def begin(self, sequence: Sequence, num_computed: int = 0) -> None:
        """Start a sequence in its slot, at the first token that is not computed."""
        self.slots.begin(sequence, num_computed)
        if not self.has_state:
            return
        slot = sequence.slot
        assert slot is not None
        self._stops.pop(slot, None)
        if self.prefixes is not None and sequence.lease is not None:
            key = self.prefix_key(sequence)
            self._stops[slot] = self.prefixes.stops(sequence.token_ids, key, num_computed)
        self.stop(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Let a sequence stop where a checkpoint is to be taken next, or another is to fork."""
        slot = sequence.slot
        if slot is None or not self.has_state:
            return
        table = self.slots
        num_computed = int(table.num_computed[slot])
        wanted = [count for count in self._stops.get(slot, ()) if count > num_computed]
        # One that begins with a prefix may be where another is to fork already.
        wanted += [
            other.fork_tokens
            for other in sequence.group.sequences
            if other.parent is sequence and other.fork_tokens >= num_computed
        ]
        table.stop_at[slot] = min(wanted, default=NEVER)

    def _pass_stops(self, slots: IntArray) -> None:
        """Mark the state of sequences that have stopped, and let them go on."""
        table = self.slots
        for slot in slots[table.num_computed[slots] == table.stop_at[slots]].tolist():
            sequence, num_tokens = table.sequences[slot], int(table.stop_at[slot])
            assert sequence is not None
            if num_tokens in self._stops.get(slot, ()):
                with suppress(DriverError):  # it can do without
                    self.cache.mark(slot, num_tokens)
            self.stop(sequence)

    def runnable(self, now_s: float) -> IntArray | None:
        """The slots whose sequences may run in the next step, in order of arrival.

        Sequences whose parents are ready fork now, and those that have outgrown their KV
        (`ModelPlan.kv_limits`) begin again, once the host knows all of their tokens.

        Returns: None if the pool is short; some of them may have forked.
        """
        table = self.slots
        running = table.in_order
        if table.kv_limits:
            are_known = table.num_known[running] == table.num_tokens[running]
            for slot in running[are_known & table.have_outgrown(running)].tolist():
                self._restart(slot, now_s)
            running = running[~table.have_outgrown(running)]
        if not self._fork_waiting():
            return None
        if self.has_state:
            self._pass_stops(running)
        return running

    def _restart(self, slot: int, now_s: float) -> None:
        """Let a sequence compute its KV again in its slot. Pre-condition: no step of it is in
        flight."""
        table, sequence = self.slots, self.slots.sequences[slot]
        assert sequence is not None
        sequence.token_ids = table.tokens(sequence).copy()
        self.unlock(sequence, now_s)
        if self.cache.can_share:
            self.cache.release(slot)
        self.begin(sequence, self._adopt(sequence, slot))

    def _adopt(self, sequence: Sequence, slot: int) -> int:
        """Let a sequence with an empty slot begin with retained KV; returns for how many tokens."""
        if self.prefixes is None or not sequence.group.reads_prefixes:
            return 0
        match = self.prefixes.match(sequence.token_ids, self.prefix_key(sequence))
        sequence.lease = self.prefixes.lock(match)
        with suppress(DriverError):  # it can do without
            kept = self.prefixes.kept(match)
            if not match.num_tokens or self.cache.resume(slot, kept, match.num_tokens):
                self.prefixes.settle(sequence.lease)
                return match.num_tokens
        self._end_lease(sequence, None)
        return 0

    def clear_slot(self, sequence: Sequence, now_s: float) -> None:
        """Give back the KV of a beam that does not go on; it keeps its slot for another beam.

        Where sequences cannot share blocks, it keeps its memory too.
        """
        assert sequence.slot is not None
        self._end_lease(sequence, now_s)
        if self.cache.can_share:
            self.cache.release(sequence.slot)
        self.slots.clear(sequence.slot)

    def give_back(self, now_s: float) -> None:
        """Give back KV of running sequences that no step to come reads.

        What steps in flight write or read stays. Prompts that are read in chunks are inserted in
        the prefix cache before.
        """
        if not self.has_windows:
            return
        table = self.slots
        slots = table.in_order
        written = self._num_written()[slots]
        if self.prefixes is not None:
            for slot in slots[(written > 0) & (written < table.num_prompt[slots])].tolist():
                sequence = table.sequences[slot]
                assert sequence is not None
                self.retain(sequence, now_s)
        self.cache.advance(slots, written)

    def _num_written(self) -> IntArray:
        """Tokens of each slot's sequence that steps have written which are done, [slots]."""
        written = self.slots.num_computed.copy()
        for plan in self.in_flight:
            slots = plan.spans.slots
            runs_still = self.slots.serial[slots] == plan.serials
            written[slots[runs_still]] -= plan.spans.counts[runs_still]
        return written

    # --- retained prefixes -------------------------------------------------------------------

    def prefix_key(self, sequence: Sequence) -> Hashable:
        """What separates the retained KV that a sequence may have, or that of another request like
        it, from that of others. Pre-condition: its `token_ids` are valid."""
        salt = sequence.request.cache_salt
        if not self.slots.kv_limits:
            return salt
        return salt, self.slots.kv_limit_of(len(sequence.token_ids))

    def prefix_keys(self, salt: str | None, num_tokens: int) -> list[Hashable]:
        """`prefix_key` of all sequences that may begin with a prefix of so many tokens."""
        if not self.slots.kv_limits:
            return [salt]
        longer = [limit + 1 for limit in self.slots.kv_limits if limit >= num_tokens]
        return [(salt, self.slots.kv_limit_of(num)) for num in (num_tokens, *longer)]

    def retain(self, sequence: Sequence, now_s: float) -> None:
        """Insert KV of a sequence in the prefix cache: what steps have written that are done.

        What a step in flight writes is left out, because that step may fail.
        """
        if self.prefixes is None or sequence.lease is None or sequence.parent is not None:
            return
        assert sequence.slot is not None
        tokens = self.slots.tokens(sequence)
        num_written = int(self.slots.num_computed[sequence.slot])
        for plan in self.in_flight:
            num_written -= int(plan.spans.counts[plan.serials == sequence.serial].sum())
        # KV can be found only by tokens that the host knows.
        num_written = min(num_written, len(tokens))
        self.prefixes.insert(sequence.lease, sequence.slot, tokens, num_written, now_s)

    def unlock(self, sequence: Sequence, now_s: float | None) -> None:
        """End a sequence's lease of retained prefixes; its own KV is inserted before.

        Args:
            sequence: the sequence; without a lease, nothing happens.
            now_s: the time; None to insert nothing, because the sequence never ran or its last step
                failed.
        """
        if now_s is not None:
            self.retain(sequence, now_s)
        self._end_lease(sequence, now_s)

    def forget_leases(self, group: SequenceGroup) -> bool:
        """End a group's leases, so that retained duplicates can be evicted; whether it had any."""
        leased = [sequence for sequence in group.sequences if self._end_lease(sequence, None)]
        return bool(leased)

    def evict_retained(self, now_s: float) -> None:
        """Evict all retained KV but what is pinned or running sequences have begun with.

        Blocks that are taken then lie side by side, on as few pages as they need.
        """
        if self.prefixes is not None:
            self.prefixes.evict(sys.maxsize, now_s)

    def _end_lease(self, sequence: Sequence, now_s: float | None) -> bool:
        """End a sequence's lease, if it has one; whether it had."""
        if self.prefixes is None or sequence.lease is None:
            return False
        self.prefixes.unlock(sequence.lease, now_s)
        sequence.lease = None
        return True

    # --- forks -------------------------------------------------------------------------------

    def _fork_waiting(self) -> bool:
        """Fork all sequences that can share what their parents have computed.

        Returns: False if the pool is short; some of them may have forked.
        """
        if self.slots.num_pending == 0:
            return True
        return all(
            self.try_fork(sequence) for group in self.running for sequence in group.sequences
        )

    def try_fork(self, sequence: Sequence) -> bool:
        """Fork a sequence if it waits for that and its parent is ready; False if there is no room.

        The parent's progress is that of the plans so far: copies come after them on the device.
        """
        table, parent = self.slots, sequence.parent
        if parent is None or parent.slot is None or sequence.slot is None:
            return True
        if parent.parent is not None or table.num_computed[parent.slot] < sequence.fork_tokens:
            return True
        # KV of a parent that is longer or shorter may not be valid for it; and a parent may have
        # begun with a prefix beyond it.
        is_valid = table.kv_limit_of(len(sequence.token_ids)) == table.kv_limit[parent.slot]
        can_fork = is_valid and self.cache.can_fork(parent.slot, sequence.fork_tokens)
        if self.has_state:
            can_fork &= table.num_computed[parent.slot] == sequence.fork_tokens
        shared = sequence.fork_tokens if can_fork else 0
        if shared and not self.cache.fork(parent.slot, sequence.slot, shared):
            return False
        table.set_parent(sequence, None)
        self.begin(sequence, shared)
        if self.prefixes is not None and parent.lease is not None and is_valid:
            sequence.lease = self.prefixes.fork(parent.lease, shared)
        return True

    # --- progress ----------------------------------------------------------------------------

    def note_progress(self, group: SequenceGroup) -> None:
        """Record how many tokens each sequence of a group has when it is admitted."""
        for sequence in group.live:
            sequence.num_begun_with = len(self.slots.tokens(sequence))

    def has_progressed(self, group: SequenceGroup) -> bool:
        """Whether any sequence of a running group has got tokens since it was admitted."""
        return any(len(self.slots.tokens(s)) > s.num_begun_with for s in group.live)

    def is_beginning_anew(self, group: SequenceGroup) -> bool:
        """Whether a running group has the pool to itself, until it gets its next token."""
        return group.begins_anew and not self.has_progressed(group)

    # --- endings -----------------------------------------------------------------------------

    def end(self, sequence: Sequence, now_s: float) -> None:
        """End a sequence. Sequences that wait to fork from it fork now, or compute themselves."""
        group, table = sequence.group, self.slots
        heir: Sequence | None = None  # the sequence that computes what the others wait for
        for other in [s for s in group.sequences if s.parent is sequence]:
            if heir is not None:
                other.fork_tokens = min(
                    other.fork_tokens, num_equal(heir.token_ids, other.token_ids)
                )
                table.set_parent(other, heir)
                continue
            with suppress(DriverError):  # it can do without sharing
                self.try_fork(other)
            if other.parent is not None:
                heir = other
                table.set_parent(other, None)
                self.begin(other)
        if heir is not None:
            self.stop(heir)
        self._mark_end(sequence)
        self.release_slot(sequence, now_s)
        group.sequences.remove(sequence)
        if not group.sequences:
            self.running.remove(group)

    def _mark_end(self, sequence: Sequence) -> None:
        """Mark the state that a sequence ends with, if a prefix can end there.

        A prefix that is to be pinned ends where its request does.
        """
        slot = sequence.slot
        if not self.has_state or slot is None or sequence.lease is None or self.prefixes is None:
            return
        num_tokens = int(self.slots.num_computed[slot])
        is_done = int(self._num_written()[slot]) == num_tokens <= len(self.slots.tokens(sequence))
        if is_done and self.prefixes.ends_block(num_tokens):
            with suppress(DriverError):
                self.cache.mark(slot, num_tokens)

    def end_all(self, group: SequenceGroup, now_s: float | None) -> None:
        """End all sequences of a running request; None as the time retains nothing of their KV."""
        for sequence in group.sequences:
            self.release_slot(sequence, now_s)
        group.sequences.clear()
        self.running.remove(group)
