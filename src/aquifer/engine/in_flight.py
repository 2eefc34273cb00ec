"""A step that was launched on the device, and its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from aquifer.cache.spans import IntArray
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.step_input import StepOutput
from aquifer.memory.driver.base import Fence

Entries: TypeAlias = Callable[[], list[TokenLogprobs]]
"""Returns log probabilities, once the device is done."""


@dataclass(slots=True)
class InFlight:
    """A step that was launched on the device."""

    most_new: IntArray  # [m], as in the step
    token_ids: torch.Tensor  # [m], on the host; valid from the fence until some steps later
    fence: Fence | None
    reported: IntArray  # indices into `token_ids` whose log probabilities were asked for
    logprobs: Entries | None = None  # their log probabilities
    # (index into the step's spans, first position, log probabilities of the positions from there)
    prompt_logprobs: list[tuple[int, int, Entries]] = field(default_factory=list)

    def wait(self) -> StepOutput:
        """Wait for the step, and return its results."""
        if self.fence is not None:
            self.fence.wait()
        reports = [] if self.logprobs is None else self.logprobs()
        return StepOutput(
            tokens=self.token_ids.numpy()[:, None].copy(),
            counts=self.most_new,
            logprobs={
                row: [report] for row, report in zip(self.reported.tolist(), reports, strict=True)
            },
            prompt_logprobs={
                (index, first + i): report
                for index, first, reports_of in self.prompt_logprobs
                for i, report in enumerate(reports_of())
            },
        )
