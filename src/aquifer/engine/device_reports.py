"""Reports of a device to what places requests on several ones."""

from __future__ import annotations

from typing import Generic

from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.lane import Lane
from aquifer.engine.model_set import HostT, ModelSet
from aquifer.engine.policies.placement import DeviceReport, ModelReport
from aquifer.engine.reports import ModelState
from aquifer.memory.room import Room

_FREE_STEPS = 1024
"""Free memory is reported in steps of this part of the budget, so that a report is seldom new."""

_PROMPT_TOKENS = 1024
"""The length of the prompts that the time for a token is reported of."""


class DeviceReporter(Generic[HostT]):
    """Makes reports of a device, cheap enough for every step.

    Args:
        models: the models that it has.
        room: their memory.
        is_exclusive: whether a model has the device for itself while it is loaded.
    """

    def __init__(self, models: ModelSet[HostT], room: Room, *, is_exclusive: bool = False) -> None:
        self._models = models
        self._room = room
        self._is_exclusive = is_exclusive
        # By model, when `_weights` was made: resident bytes, and what else changes it.
        self._known: dict[str, tuple[int, int]] = {}
        self._weights: dict[str, ModelReport] = {}

    def report(self) -> DeviceReport:
        """The device as it is now."""
        known = {
            host.info.name: (host.resident_bytes, host.weights.num_borrowed_changes)
            for host in self._models
        }
        if known != self._known:  # what is missing takes time to find out
            self._weights = {host.info.name: self._of_weights(host) for host in self._models}
            self._known = known
        budget_pages = self._room.budget_pages()
        step_pages = max(budget_pages // _FREE_STEPS, 1)
        loads_s = [host.loaded_s for host in self._models if host.loaded_s is not None]
        free_bytes = self._room.size(self._room.free_pages // step_pages * step_pages)
        missing_bytes = max((of.missing_bytes for of in self._weights.values()), default=0)
        return DeviceReport(
            {host.info.name: self._of_model(host) for host in self._models},
            self._room.size(budget_pages),
            free_bytes,
            max(loads_s, default=None),
            sum(_backlog_s(host.lane) for host in self._models if host.lane.running),
            self._is_exclusive,
            is_short=missing_bytes > free_bytes,
        )

    def _of_model(self, host: HostT) -> ModelReport:
        token_s = host.lane.recompute_s(0, _PROMPT_TOKENS) / _PROMPT_TOKENS
        cache = host.lane.cache
        return self._weights[host.info.name]._replace(
            is_resident=host.state == ModelState.RESIDENT,
            is_loading=host.state == ModelState.LOADING,
            has_failed=host.state == ModelState.FAILED,
            oldest_s=_oldest_s(host.lane),
            token_s=float(f"{token_s:.1g}"),  # it is measured anew with each prompt
            free_bucket_tokens=cache.free_bucket_tokens
            if isinstance(cache, BucketedCache)
            else None,
            output_tokens=int(float(f"{host.lane.output_tokens:.1g}")),
        )

    def _of_weights(self, host: HostT) -> ModelReport:
        """What takes time to find out of a model, and changes only with what is resident
        and what is mapped of other devices."""
        missing_bytes = self._room.size(host.weights.missing_pages)
        return ModelReport(
            host.info.weight_bytes,
            missing_bytes,
            host.weights.missing_s if missing_bytes else 0.0,
            host.weights.borrowed_s,
            can_run=self._models.kv_pages(host) > 0,
        )


def _oldest_s(lane: Lane) -> float | None:
    """When the first request arrived that waits and has never run; None if there is none."""
    firsts = (
        next((group for group in lane.waiting.of(client) if group.scheduled_s is None), None)
        for client in lane.waiting.clients
    )
    return min((group.request.arrival_s for group in firsts if group is not None), default=None)


def _backlog_s(lane: Lane) -> float:
    """Seconds to compute what is left of the prompts of a model that are being read."""
    running = lane.slots.in_order
    left = lane.slots.num_tokens[running] - lane.slots.num_computed[running]
    num_tokens = int(left[left > 1].sum())
    return lane.recompute_s(0, num_tokens) if num_tokens else 0.0
