"""Sampling on the CPU, the implementation of `aquifer.kernels.sampling.sample` there.

Rows are processed in blocks, so that the float64 copies stay small; a block is vectorised. For most
rows with top-k or top-p it is enough to sort the most probable tokens; other rows are sorted whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from aquifer.kernels.sampling.columns import GREEDY_BELOW, IN_PROMPT, SamplingColumns
from aquifer.kernels.sampling.philox import uniform

_BLOCK_ROWS = 32
_CANDIDATES = 1024  # most probable tokens, which are sorted first

IntArray = npt.NDArray[np.int64]


def sample_host(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
) -> None:
    """`aquifer.kernels.sampling.sample` for CPU tensors; the logits are not modified."""
    for start in range(0, len(logits), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        _sample_block(logits[rows], slots[rows], num_tokens[rows], columns, out[rows])


def _sample_block(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
) -> None:
    is_used = slots >= 0
    if not is_used.all():
        logits, slots, num_tokens = logits[is_used], slots[is_used], num_tokens[is_used]
    logits = logits.float()
    counts_row = columns.counts_row[slots].numpy()
    counted = np.flatnonzero(counts_row >= 0)
    if len(counted):
        logits = logits.clone()
        for row in counted.tolist():
            _penalise(logits[row], columns.counts[counts_row[row]], columns.floats[3:, slots[row]])
    temperature = columns.temperature[slots]
    is_greedy = temperature < GREEDY_BELOW
    tokens = torch.empty_like(slots)
    if is_greedy.all():
        tokens = logits.argmax(-1)
    elif is_greedy.any():
        tokens[is_greedy] = logits[is_greedy].argmax(-1)
    is_drawn = ~is_greedy
    if is_drawn.any():
        if not is_drawn.all():
            logits, slots, num_tokens = logits[is_drawn], slots[is_drawn], num_tokens[is_drawn]
            temperature = temperature[is_drawn]
        tokens[is_drawn] = torch.from_numpy(
            _draw(
                logits / temperature.unsqueeze(1),
                columns.top_k[slots].numpy(),
                columns.top_p[slots].numpy(),
                columns.min_p[slots].numpy(),
                uniform(columns.seed[slots].numpy().view(np.uint64), num_tokens.numpy()),
            )
        )
    if len(counted):
        columns.counts[torch.from_numpy(counts_row[counted]), tokens[counted]] += 1
    out[is_used] = tokens


def _penalise(logits: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> None:
    """Penalise one row, [vocab], in place; `penalties` are repetition, presence and frequency."""
    repetition, presence, frequency = penalties
    seen = counts.nonzero().squeeze(1)  # a small part of the vocabulary
    scores = logits[seen]
    times = counts[seen] % IN_PROMPT
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    logits[seen] = torch.where(times > 0, scores - (presence + frequency * times), scores)


def _draw(
    scores: torch.Tensor,
    top_k: IntArray,
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    numbers: npt.NDArray[np.float64],
) -> IntArray:
    """Sample from softmax(scores), [n, vocab], after min-p, top-k, top-p; `numbers` in [0, 1)."""
    probs = scores.softmax(-1, dtype=torch.float64)
    vocab_size = probs.shape[1]
    if min_p.any():
        threshold = torch.from_numpy(min_p).unsqueeze(1) * probs.amax(-1, keepdim=True)
        probs = torch.where(probs < threshold, 0.0, probs)
    k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    is_cut = (k < vocab_size) | (top_p < 1)
    tokens = np.empty(len(numbers), np.int64)
    whole = np.flatnonzero(~is_cut)
    if len(whole):
        rows = probs if len(whole) == len(probs) else probs[torch.from_numpy(whole)]
        tokens[whole] = _invert(rows, numbers[whole])
    cut = np.flatnonzero(is_cut)
    if len(cut):
        rows = probs if len(cut) == len(probs) else probs[torch.from_numpy(cut)]
        tokens[cut] = _draw_cut(rows, k[cut], top_p[cut], numbers[cut])
    return tokens


def _draw_cut(
    probs: torch.Tensor,
    k: IntArray,
    top_p: npt.NDArray[np.float32],
    numbers: npt.NDArray[np.float64],
) -> IntArray:
    """`_draw` for rows with top-k or top-p; `k` in [1, vocab]."""
    vocab_size = probs.shape[1]
    ranked = probs.topk(min(_CANDIDATES, vocab_size), dim=1).values
    weights, reached = _cut(ranked, probs.sum(1), k, top_p)
    enough = (k <= ranked.shape[1]) | ((k == vocab_size) & reached)
    tokens = np.empty(len(numbers), np.int64)
    settled = np.flatnonzero(enough)
    if len(settled):
        index = torch.from_numpy(settled)
        places = _invert(weights[index], numbers[settled])
        for row, place in zip(settled.tolist(), places.tolist(), strict=True):
            tokens[row] = _token_at(probs[row], ranked[row], place)
    for row in np.flatnonzero(~enough).tolist():
        one = slice(row, row + 1)
        # Values alone: NumPy sorts them several times faster than with their indices.
        values = torch.from_numpy(np.sort(probs[row].numpy())).flip(0)
        weights, _ = _cut(values.unsqueeze(0), probs[one].sum(1), k[one], top_p[one])
        tokens[row] = _token_at(probs[row], values, int(_invert(weights, numbers[one])[0]))
    return tokens


def _cut(
    ranked: torch.Tensor, total: torch.Tensor, k: IntArray, top_p: npt.NDArray[np.float32]
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """Apply top-k and top-p to the most probable tokens of each row.

    Args:
        ranked: [n, m], probabilities in descending order.
        total: [n], the sum of the whole row; top-p is a fraction of it if `k` is more than m.
        k: [n].
        top_p: [n].

    Returns:
        [n, m], zero for excluded tokens; and [n], whether these tokens satisfy top-p.
    """
    limit = torch.from_numpy(k).unsqueeze(1)
    values = torch.where(torch.arange(ranked.shape[1]) < limit, ranked, 0.0)
    mass = torch.where(limit > ranked.shape[1], total.unsqueeze(1), values.sum(1, keepdim=True))
    wanted = torch.from_numpy(top_p).unsqueeze(1) * mass
    sums = values.cumsum(1)
    reached = (sums[:, -1:] >= wanted).squeeze(1).numpy()
    return torch.where(sums - values < wanted, values, 0.0), reached


def _token_at(probs: torch.Tensor, ranked: torch.Tensor, place: int) -> int:
    """Return the token at a rank in descending probability; ties are in the order of ids."""
    value = ranked[place]
    num_before = int((ranked[:place] > value).sum())
    equal = (probs == value).nonzero()
    return int(equal[place - num_before]) if len(equal) else 0  # NaN equals nothing


def _invert(weights: torch.Tensor, numbers: npt.NDArray[np.float64]) -> IntArray:
    """Invert the CDF: the column where each row's running sum passes number * total."""
    sums = weights.cumsum(1)
    targets = torch.from_numpy(numbers).unsqueeze(1) * sums[:, -1:]
    columns = np.asarray(torch.searchsorted(sums, targets, right=True).squeeze(1).numpy(), np.int64)
    # Rounding may put the target at the end, after the last column with a positive weight.
    for row in np.flatnonzero(columns == weights.shape[1]).tolist():
        positive = weights[row].nonzero()
        columns[row] = int(positive[-1]) if len(positive) else weights.shape[1] - 1
    return columns
