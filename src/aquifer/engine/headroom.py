"""Headroom: whether an admission leaves running sequences room to grow.

Where the lengths of outputs are forecast, that is room for the peak of all of them together: at
each of some horizons, sequences that still run will have grown, and the others will have given
their pages back. Memory is set aside for the sum, not for the longest that each one can become, so
it is used and yet preemption is rare.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aquifer.cache.prefix import Match
from aquifer.engine.forecasts import Change, SlotForecasts
from aquifer.engine.lane import Lane
from aquifer.engine.sequence import SequenceGroup
from aquifer.memory.room import Room
from aquifer.memory.runs import num_equal
from aquifer.predict.lengths import Forecast

_RUN_TOKENS = 64
"""Tokens that all sequences must have room for when a preempted request comes back.

To restore it costs a prefill or two copies, as much as some dozen steps of a batch. If a request is
preempted again before it has run for that long, restoring it cost more than it brought, and the
batch thrashes. A sequence that ends earlier counts with the tokens that it has left."""

_DEVIATIONS = 1.1
"""Standard deviations above the expected memory that are kept free, where lengths are forecast.

More of them leave memory idle, fewer preempt more often; benchmarks/odma has the figures."""


class Headroom:
    """Estimates the pages that an admission needs, and whether there is room for them.

    Without it, a request might be preempted a few steps after its admission, and its prompt would
    have been computed in vain.

    Args:
        room: room of the pool that all lanes share.
        lanes: the lanes of all models.
        plans_by_forecasts: whether forecasts of lengths count, where there are any.
    """

    def __init__(
        self, room: Room, lanes: Mapping[str, Lane], *, plans_by_forecasts: bool = True
    ) -> None:
        self._room = room
        self._plans_by_forecasts = plans_by_forecasts
        # What was expected last of a waiting request, and of which.
        self._waiting: tuple[tuple[Forecast, SequenceGroup, list[int]], Change] | None = None
        self._lanes = lanes

    def has_room(self, lane: Lane, group: SequenceGroup, match: Match | None) -> bool:
        """Whether there is room for a request's tokens, and for running sequences to grow.

        Args:
            lane: lane of the request's model.
            group: a waiting request.
            match: its retained prefix; None if prefixes are not used. It takes no pages, but no
                longer counts as evictable.
        """
        num_running = sum(other.slots.num_taken for other in self._lanes.values())
        if not num_running or not lane.cache.can_share:  # what is reserved at once does not grow
            return True
        first, *others = group.live
        footprint = lane.cache.footprint
        needed_pages = footprint.needed(
            len(first.token_ids) + 1, 0 if match is None else match.num_tokens
        )
        if lane.prefixes is not None and match is not None:
            needed_pages += lane.prefixes.evictable_pages(match)
        for sequence in others:
            shared = num_equal(first.token_ids, sequence.token_ids)
            needed_pages += footprint.pages(len(sequence.token_ids) + 1 - shared)
        run_tokens = _RUN_TOKENS if group.num_preemptions else 1
        growth_pages, change = 0, Change.none()
        for other in self._lanes.values():
            table = other.slots
            slots = table.in_order
            if self._plans_by_forecasts:
                change += other.forecasts.change(
                    other.cache.footprint,
                    slots,
                    table.num_tokens[slots],
                    table.num_prompt[slots],
                    table.limit_total[slots],
                )
            left = table.limit_total[slots] - table.num_tokens[slots]
            left = np.minimum(np.maximum(left, 0), run_tokens)
            lengths = table.num_tokens[slots]
            if other is lane and group.num_preemptions:
                left = np.append(left, np.full(len(group.live), run_tokens))
                lengths = np.append(lengths, [len(sequence.token_ids) for sequence in group.live])
            growth_pages += other.cache.footprint.growth(left, lengths)
        if self._plans_by_forecasts:
            change += self._change_of_waiting(lane, group)
        return self._room.has(needed_pages + max(growth_pages, change.peak(_DEVIATIONS)))

    def _change_of_waiting(self, lane: Lane, group: SequenceGroup) -> Change:
        """How the memory of a waiting request is expected to change once it runs."""
        forecast = lane.forecast(group)
        if forecast is None:
            return Change.none()
        lengths = np.array([len(sequence.token_ids) for sequence in group.live])
        # A request that waits is asked about again and again.
        key = (forecast, group, lengths.tolist())
        if self._waiting is None or self._waiting[0] != key:
            forecasts = SlotForecasts(len(lengths))
            for slot in range(len(lengths)):
                forecasts.set(slot, forecast)
            change = forecasts.change(
                lane.cache.footprint,
                np.arange(len(lengths)),
                lengths,
                np.full(len(lengths), group.num_prompt_tokens),
                np.full(len(lengths), group.limit_total),
            )
            self._waiting = key, change
        return self._waiting[1]
