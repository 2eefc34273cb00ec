"""A worker of a replayed cluster: one life of a device, and what the placement knows of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from aquifer.engine.device_reports import DeviceReporter
from aquifer.engine.policies.placement import (
    DeviceReport,
    DeviceState,
    ModelReport,
    device_state,
)
from aquifer.errors import ConfigError
from aquifer.sim.clock import Arrivals
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import distinct
from aquifer.sim.replay import DeviceReplay
from aquifer.sim.trace import PromptMaker, TraceRequest

NOT_ABLE = DeviceState(can_run=False, load_s=0.0, num_requests=0)
"""State of a worker that is gone, or too small for a model."""


def reports_of_unopened(config: ReplayConfig) -> dict[str, ModelReport]:
    """Reports of all models that fit a device, from one that has nothing in its memory.

    So models need not be opened on a device before a request is placed there.
    """
    assert config.loading is not None
    by_shape: dict[int, ModelReport] = {}
    for name, shape in distinct(config.models).items():
        with ExitStack() as resources:
            try:
                device = DeviceReplay(
                    replace(config, models={name: shape}), Arrivals(), PromptMaker([]), resources
                )
            except ConfigError:  # too large
                continue
            models = device.models
            assert models is not None
            reporter = DeviceReporter(
                models.set, device.room, is_exclusive=config.loading.is_exclusive
            )
            by_shape[id(shape)] = reporter.report().models[name]
    return {
        name: by_shape[id(shape)] for name, shape in config.models.items() if id(shape) in by_shape
    }


class Worker:
    """A device of a cluster from its start, with nothing in its memory, to its end.

    Args:
        config: its configuration, with the models that fit.
        unopened: reports of models that it has not opened; others do not fit.
        prompts: makes the tokens of prompts.
        resources: the stack that closes it.
        report_s: it reports when it has got a request, and this long after its latest report.

    Attributes:
        numbers: number of each request in the trace, in the order in which they were placed here.
        replay: the device.
        ended_s: when it has ended; None as long as it runs.
    """

    def __init__(
        self,
        config: ReplayConfig,
        unopened: Mapping[str, ModelReport],
        prompts: PromptMaker,
        resources: ExitStack,
        report_s: float,
    ) -> None:
        self.numbers: list[int] = []
        self.ended_s: float | None = None
        self._unopened = unopened
        self._report_s = report_s
        self._arrivals = Arrivals()
        self.replay = DeviceReplay(config, self._arrivals, prompts, resources)
        models = self.replay.models
        assert models is not None
        self._models = models
        self._reporter = DeviceReporter(
            models.set, self.replay.room, is_exclusive=models.loading.is_exclusive
        )
        self._num_placed: Counter[str] = Counter()
        self._num_requests: dict[str, int] = {}  # of models that had some at the latest report
        self._known: dict[str, ModelReport] = {}
        self._report: DeviceReport | None = None  # `_known` is its `models`
        self._reported_s = -math.inf
        self._is_changed = True  # since the latest report a request was placed here

    def state(self, request: TraceRequest, now_s: float) -> DeviceState:
        """The worker as a request sees it that is to be placed now."""
        model = request.model
        assert model is not None
        unopened = self._unopened.get(model)
        if unopened is None:
            return NOT_ABLE
        if self._report is None or self._must_report(now_s):
            self._report = self._new_report(now_s)
        self._known.setdefault(model, unopened)
        return device_state(
            self._report,
            model,
            self._num_requests,
            max(self.replay.now_s, now_s),
            request.prompt_tokens,
            request.prompt_tokens,
        )

    def add(self, number: int, request: TraceRequest) -> None:
        """Place a request here. Pre-condition: `state` was called for it.

        Args:
            number: of the request in the trace.
            request: the request; its arrival is when it is placed.
        """
        assert request.model is not None
        self.numbers.append(number)
        self._arrivals.add(request)
        self._num_placed[request.model] += 1
        self._num_requests[request.model] = self._num_requests.get(request.model, 0) + 1
        self._is_changed = True

    def end(self, now_s: float) -> None:
        """The worker ends: nothing goes on from now on, and its latest report stays."""
        self.replay.run(until_s=now_s)
        self.ended_s = now_s

    def unfinished(self) -> dict[int, bool]:
        """Drop all requests that had not ended when the worker did.

        Returns: whether each had got a token, by its number in the trace.
        """
        assert self.ended_s is not None
        dropped = self.replay.drop_unfinished(self.ended_s)
        return {self.numbers[index]: has_tokens for index, has_tokens in dropped.items()}

    def _must_report(self, now_s: float) -> bool:
        if self.ended_s is not None:
            return False
        if self._is_changed:
            return True
        is_constant = not self.replay.has_work and self._models.loading.keep_alive_s is None
        return not is_constant and now_s >= self._reported_s + self._report_s

    def _new_report(self, now_s: float) -> DeviceReport:
        """Let the device run until now, and report."""
        replay = self.replay
        replay.run(until_s=now_s)
        self._models.expire(now_s)
        self._is_changed, self._reported_s = False, now_s
        left = {
            name: self._num_placed[name] - replay.num_ended[name] for name in self._num_requests
        }
        self._num_requests = {name: count for name, count in left.items() if count}
        report = self._reporter.report()
        self._known = {
            **{name: self._unopened[name] for name in self._num_requests},
            **report.models,
        }
        return report._replace(models=self._known)
