"""The first step of a model that was loaded, before it is reported as ready.

A configuration may be valid field by field and still describe a model that cannot run. A step with
the real weights, cache and runner shows that while the model is loaded, and not when the first
request comes.
"""

from __future__ import annotations

import logging
import math

import numpy as np

from aquifer.cache.spans import IntArray, Spans
from aquifer.engine.lane import Lane
from aquifer.engine.params import SamplingParams
from aquifer.engine.runner import Runner
from aquifer.engine.step_input import SlotAssignment, StepInput

_log = logging.getLogger(__name__)

_SLOT = 1
_MOST_TOKENS = 8
_ID_STEP = 7919  # a prime, so that the token ids are spread over any vocabulary


def run_first_step(lane: Lane, runner: Runner, vocab_size: int, max_batched_tokens: int) -> None:
    """Run a prompt of a few tokens in the first slot, sample a token, and give its pages back.

    Without room for the KV of a single token nothing is run: a model of which no request could run
    is refused later, and one that waits for others to give memory back is not to fail.

    Logits that are not finite are reported as a warning and no error: a weight that is never used
    may be to blame.

    Args:
        lane: the model's lane, without running sequences.
        runner: its runner, with no step in flight.
        vocab_size: number of its tokens.
        max_batched_tokens: tokens of the largest step.

    Raises:
        Exception: anything that the model raises; its pages are back then, too.
    """
    assert not lane.slots.num_taken, "a lane without running sequences"
    max_tokens = lane.slots.token_ids.shape[1]
    most = max(min(_MOST_TOKENS, max_tokens - 1, max_batched_tokens), 1)
    for num_tokens in (most, 1):
        if lane.cache.reserve(np.array([_SLOT]), np.array([num_tokens])):
            break
    else:
        return
    try:
        lane.cache.upload()
        step = _first_step(lane.name, np.arange(1, num_tokens + 1) * _ID_STEP % vocab_size)
        (report,) = runner.launch(step).wait().logprobs[0]
    finally:
        lane.cache.release(_SLOT)
    # A logit that is infinite or no number makes the chosen token's log probability so, too.
    if not math.isfinite(report.logprobs[0]):
        _log.warning(
            "the first logits of %s are not finite, so its answers are likely to be useless: a "
            "weight is damaged, or too large for its dtype; try --dtype float32",
            lane.name,
        )


def _first_step(name: str, token_ids: IntArray) -> StepInput:
    """The step that runs a whole prompt, [n], and samples greedily."""
    num_tokens = len(token_ids)
    assignment = SlotAssignment(
        slot=_SLOT,
        seed=0,
        num_prompt_tokens=num_tokens,
        least_context_tokens=num_tokens,
        min_total_tokens=0,
        stop_ids=frozenset(),
        params=SamplingParams(temperature=0.0),
        num_logprobs=0,
        num_prompt_logprobs=None,
        token_ids=np.zeros(0, np.int32),
    )
    return StepInput(
        model=name,
        spans=Spans.make(np.array([_SLOT]), np.array([0]), np.array([num_tokens])),
        serials=np.array([-1]),
        token_ids=token_ids,
        num_decodes=0,
        num_single=int(num_tokens == 1),
        sampled=np.array([0]),
        most_new=np.array([1]),
        assigned=(assignment,),
    )
