"""Which token comes next.

Every row is treated by itself: what it gets depends on its own logits, parameters, seed and
position only. The order of the steps is vLLM's: allowed tokens, biases, penalties, temperature,
min-p, top-k, top-p.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.base import IntArray
from aquifer.engine.random import uniform
from aquifer.engine.request import TokenLogprobs
from aquifer.engine.slots import Sequence, SlotTable

_GREEDY_BELOW = 1e-5  # a temperature so low that dividing by it would overflow
_CANDIDATES = 1024
"""How many of the most probable tokens are sorted at first. Nearly always top-p is satisfied
among them; where it is not, the row is sorted whole."""


def sample(logits: torch.Tensor, table: SlotTable, slots: IntArray) -> IntArray:
    """Choose a token for each row.

    Args:
        logits: [n, vocab] float32; overwritten.
        table: the parameters of all running sequences.
        slots: [n], the slot of each row.

    Returns:
        [n] token ids.
    """
    for row in np.flatnonzero(table.changes_logits[slots]).tolist():
        _change_logits(logits[row], table, int(slots[row]))
    temperature = table.temperature[slots]
    tokens: IntArray = logits.argmax(-1).numpy()
    random_rows = np.flatnonzero(temperature >= _GREEDY_BELOW)
    if len(random_rows):
        chosen = slots[random_rows]
        scores = logits[torch.from_numpy(random_rows)]
        scores /= torch.from_numpy(temperature[random_rows]).unsqueeze(1)
        numbers = uniform(table.seed[chosen], table.num_tokens[chosen])
        tokens[random_rows] = _draw(
            scores, table.top_k[chosen], table.top_p[chosen], table.min_p[chosen], numbers
        )
    return tokens


def token_logprobs(
    logits: torch.Tensor, tokens: IntArray, num_logprobs: IntArray
) -> list[TokenLogprobs]:
    """Log probabilities of each row's token and of the most probable ones.

    Args:
        logits: [n, vocab] float32, as the model gave them.
        tokens: [n], the token to report first.
        num_logprobs: [n], how many of the most probable to report.
    """
    logprobs = logits.log_softmax(-1)
    chosen = torch.from_numpy(tokens).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(1) + 1
    top_values, top_ids = logprobs.topk(max(int(num_logprobs.max()), 1), dim=1)
    entries = []
    for i, count in enumerate(num_logprobs.tolist()):
        entries.append(
            TokenLogprobs(
                token_ids=[int(tokens[i]), *top_ids[i, :count].tolist()],
                logprobs=[float(own[i, 0]), *top_values[i, :count].tolist()],
                ranks=[int(ranks[i]), *range(1, count + 1)],
            )
        )
    return entries


def _change_logits(logits: torch.Tensor, table: SlotTable, slot: int) -> None:
    """Apply what is particular to one request to its row, in place."""
    sequence = table.sequences[slot]
    assert sequence is not None
    params = sequence.request.params
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(list(params.allowed_token_ids))
        kept = logits[allowed]
        logits.fill_(-math.inf)
        logits[allowed] = kept
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    if table.num_tokens[slot] < table.min_total[slot]:
        _forbid_stops(logits, sequence)
    known = torch.from_numpy(table.token_ids[slot, : table.num_tokens[slot]].astype(np.int64))
    if params.repetition_penalty != 1:
        seen = known.unique()
        scores = logits[seen]
        logits[seen] = torch.where(
            scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        output, counts = known[sequence.num_prompt_tokens :].unique(return_counts=True)
        logits[output] -= params.presence_penalty + params.frequency_penalty * counts


def _forbid_stops(logits: torch.Tensor, sequence: Sequence) -> None:
    """Before `min_tokens`, no token that would end the output; unless nothing else is left."""
    stops = torch.tensor(sorted(sequence.stop_ids), dtype=torch.int64)
    kept = logits[stops]
    logits[stops] = -math.inf
    if not logits.isfinite().any():
        logits[stops] = kept


def _draw(
    scores: torch.Tensor,
    top_k: IntArray,
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    numbers: npt.NDArray[np.float64],
) -> IntArray:
    """Draw from softmax(scores), [n, vocab], cut by min-p, top-k and top-p; `numbers` in [0, 1)."""
    probs = scores.softmax(-1, dtype=torch.float64)
    if min_p.any():
        threshold = torch.from_numpy(min_p).unsqueeze(1) * probs.amax(-1, keepdim=True)
        probs = torch.where(probs < threshold, 0.0, probs)
    tokens = np.empty(len(numbers), np.int64)
    is_cut = ((top_k > 0) & (top_k < probs.shape[1])) | (top_p < 1)
    whole = np.flatnonzero(~is_cut)
    if len(whole):
        tokens[whole] = _invert(probs[torch.from_numpy(whole)], numbers[whole])
    cut = np.flatnonzero(is_cut)
    num_candidates = _CANDIDATES
    while len(cut):
        num_candidates = min(max(num_candidates, int(top_k[cut].max())), probs.shape[1])
        index = torch.from_numpy(cut)
        values, ids, complete = _candidates(probs[index], top_k[cut], top_p[cut], num_candidates)
        done = np.flatnonzero(complete)
        picked = _invert(values[torch.from_numpy(done)], numbers[cut[done]])
        tokens[cut[done]] = ids[torch.from_numpy(done), torch.from_numpy(picked)].numpy()
        cut = cut[~complete]
        num_candidates = probs.shape[1]
    return tokens


def _candidates(
    probs: torch.Tensor,
    top_k: IntArray,
    top_p: npt.NDArray[np.float32],
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.bool_]]:
    """The most probable tokens, those outside of top-k and top-p at probability zero.

    Returns:
        (probabilities, token ids), each [n, num_candidates], best first, and [n] bool: whether
        that many candidates were enough to know.
    """
    num_tokens = probs.shape[1]
    k = torch.from_numpy(np.where(top_k > 0, top_k, num_tokens)).unsqueeze(1)
    values, ids = probs.topk(num_candidates, dim=1)
    values = torch.where(torch.arange(num_candidates) < k, values, 0.0)
    # What top-p is a fraction of: all that top-k has left.
    mass = torch.where(k > num_candidates, probs.sum(1, keepdim=True), values.sum(1, keepdim=True))
    wanted = torch.from_numpy(top_p).unsqueeze(1) * mass
    before = values.cumsum(1) - values
    reached = before[:, -1:] + values[:, -1:] >= wanted
    complete = (k <= num_candidates) | reached
    return torch.where(before < wanted, values, 0.0), ids, complete.squeeze(1).numpy()


def _invert(weights: torch.Tensor, numbers: npt.NDArray[np.float64]) -> IntArray:
    """The column where each row's running sum passes its number, as a fraction of the total."""
    sums = weights.cumsum(1)
    targets = torch.from_numpy(numbers).unsqueeze(1) * sums[:, -1:]
    columns = torch.searchsorted(sums, targets, right=True).squeeze(1)
    # Rounding may put the target at the very end, behind the last column of any weight.
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(1)
    return np.asarray(torch.minimum(columns, last).numpy(), np.int64)
