"""Made-up outputs of simulated steps: tokens, and candidates of beams."""

from __future__ import annotations

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.slots import SlotTable
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.sim.trace import NUM_OUTPUT_IDS


def made_up_tokens(serials: IntArray) -> IntArray:
    """Return a token for each sequence, different from those of all other sequences."""
    return serials % NUM_OUTPUT_IDS


class OutputMaker:
    """Makes up the outputs of steps.

    Args:
        has_beams: whether requests are beam searches.
        seed: seed of the beams' scores.
    """

    def __init__(self, has_beams: bool, seed: int) -> None:
        self._has_beams = has_beams
        self._random = np.random.default_rng(seed)

    def output(self, plan: StepInput, table: SlotTable) -> StepOutput:
        """Make up the output of a planned step of the sequences in `table`."""
        tokens = made_up_tokens(plan.serials[plan.sampled])[:, None]
        return StepOutput(tokens, plan.most_new, self._beam_reports(plan, table))

    def _beam_reports(self, plan: StepInput, table: SlotTable) -> dict[int, list[TokenLogprobs]]:
        """Make up candidates for each beam in the step.

        The best continuation of a beam has a probability of about 0.6, and each next one about half
        that of the one before. These figures determine how often beams fork and end.
        """
        reports: dict[int, list[TokenLogprobs]] = {}
        if not self._has_beams:
            return reports
        for index, row in enumerate(plan.sampled.tolist()):
            sequence = table.sequences[plan.spans.slots[row]]
            if sequence is None or sequence.num_logprobs is None:
                continue
            count = sequence.num_logprobs
            steps = self._random.exponential(np.log(2), count)
            logprobs = np.log(0.6) - np.cumsum(steps) + np.log(2)
            ids = self._random.permutation(count) + 1
            ranks = list(range(1, count + 2))
            reports[index] = [TokenLogprobs([0, *ids.tolist()], [0.0, *logprobs.tolist()], ranks)]
        return reports
