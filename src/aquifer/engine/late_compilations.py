"""Monitor of kernels that are compiled while requests wait, which loading should have compiled."""

from __future__ import annotations

import logging

from aquifer.engine.step_input import StepInput
from aquifer.kernels import compilations

_log = logging.getLogger(__name__)


class LateCompilations:
    """Counts the kernels that are compiled, or read from disk, within steps.

    Attributes:
        count: kernels so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._begun = 0

    def begin(self) -> None:
        """A step begins: its plan, its copies, its launch."""
        self._begun = compilations.count

    def end(self, plan: StepInput | None) -> None:
        """A step has been launched; report what was compiled for it."""
        num_compiled = compilations.count - self._begun
        if not num_compiled:
            return
        self.count += num_compiled
        step = f" in a step of {plan.spans.num_tokens} tokens of {plan.model}" if plan else ""
        _log.warning(
            "%d kernels were compiled while requests waited%s; please report this",
            num_compiled,
            step,
        )
