"""Times in messages, moved between the clocks of two machines.

Requests have the time of their arrival, and reports of devices and of timing have times of the
device's clock. Each machine counts the seconds of time.monotonic() from another moment.
"""

from __future__ import annotations

from dataclasses import replace

from aquifer.engine.outputs import RequestTiming, TokenOutput
from aquifer.engine.policies.placement import DeviceReport
from aquifer.serve.messages import Add, FromEngine, Ready, Step, ToEngine


def on_their_clock(message: ToEngine, offset_s: float) -> ToEngine:
    """A message to an engine process whose clock is so much ahead of ours."""
    if isinstance(message, Add):
        request = message.request
        return replace(message, request=replace(request, arrival_s=request.arrival_s + offset_s))
    return message


def on_our_clock(message: FromEngine, offset_s: float) -> FromEngine:
    """A message from an engine process whose clock is so much ahead of ours."""
    if isinstance(message, Ready):
        return replace(message, report=_report(message.report, offset_s))
    if not isinstance(message, Step):
        return message
    for _, output in message.outputs.others:
        _move_timing(output, offset_s)
    if message.report is None:
        return message
    return replace(message, report=_report(message.report, offset_s))


def _move_timing(output: TokenOutput, offset_s: float) -> None:
    if (timing := output.timing) is not None:
        output.timing = RequestTiming(
            timing.arrival_s - offset_s,
            _earlier(timing.scheduled_s, offset_s),
            _earlier(timing.first_token_s, offset_s),
            _earlier(timing.last_token_s, offset_s),
        )


def _report(report: DeviceReport, offset_s: float) -> DeviceReport:
    models = {
        name: model._replace(oldest_s=_earlier(model.oldest_s, offset_s))
        for name, model in report.models.items()
    }
    return report._replace(models=models, loaded_s=_earlier(report.loaded_s, offset_s))


def _earlier(time_s: float | None, offset_s: float) -> float | None:
    return None if time_s is None else time_s - offset_s
