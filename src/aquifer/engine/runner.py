"""Runs a plan: from token ids to the next token ids. Sees addresses, allocates nothing."""

from __future__ import annotations

import numpy as np
import torch

from aquifer.engine.request import TokenLogprobs
from aquifer.engine.sampler import sample, token_logprobs
from aquifer.engine.scheduler import Plan, Sampled
from aquifer.models import Model, ModelInput


class Runner:
    """Runs the steps of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        """Compute a step: write its KV, and sample for the sequences that are due."""
        table, spans = plan.lane.slots, plan.spans
        slots, positions = spans.rows()
        batch = ModelInput(
            token_ids=torch.from_numpy(table.token_ids[slots, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            context_lengths=torch.from_numpy(np.maximum(table.num_prompt[slots], positions + 1)),
        )
        hidden = self._model.forward(batch, plan.lane.cache.view(spans))
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        if not len(plan.sampled):
            return Sampled(np.zeros(0, np.int64), {}, prompt_logprobs)
        last_rows = torch.from_numpy(spans.offsets[1:][plan.sampled] - 1)
        logits = self._model.logits(hidden[last_rows])
        sampled_slots = spans.slots[plan.sampled]
        num_logprobs = table.num_logprobs[sampled_slots]
        reported = np.flatnonzero(num_logprobs >= 0)
        raw = logits[torch.from_numpy(reported)]  # a copy: sampling overwrites the logits
        tokens = sample(logits, table, sampled_slots)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(reported):
            entries = token_logprobs(raw, tokens[reported], num_logprobs[reported])
            logprobs = dict(zip(reported.tolist(), entries, strict=True))
        return Sampled(tokens, logprobs, prompt_logprobs)

    def _prompt_logprobs(
        self, plan: Plan, hidden: torch.Tensor
    ) -> dict[tuple[int, int], TokenLogprobs]:
        """Log probabilities of those prompt tokens whose predecessors are in this step."""
        table, spans = plan.lane.slots, plan.spans
        result: dict[tuple[int, int], TokenLogprobs] = {}
        for index in np.flatnonzero(table.needs_care[spans.slots]).tolist():
            slot, start = int(spans.slots[index]), int(spans.starts[index])
            sequence = table.sequences[slot]
            assert sequence is not None
            wanted = sequence.request.params.prompt_logprobs
            end = min(start + int(spans.counts[index]), sequence.num_prompt_tokens - 1)
            if wanted is None or sequence.first_token_s is not None or end <= start:
                continue
            row = int(spans.offsets[index])
            logits = self._model.logits(hidden[row : row + end - start])
            targets = table.token_ids[slot, start + 1 : end + 1].astype(np.int64)
            entries = token_logprobs(logits, targets, np.full(len(targets), wanted))
            result.update({(index, start + 1 + i): entry for i, entry in enumerate(entries)})
        return result
