"""Sampling: from logits to token ids, on the device without host synchronisation.

The order of operations is vLLM's: penalties, temperature, min-p, top-k, top-p, then the inverse CDF
at one Philox number, which depends only on the request's seed and the token's position.
`reference.py` is the specification, `host.py` the CPU path. The device never sorts the vocabulary:

1. `chunk_kernel`: one program per 4096 tokens of a row finds their largest score, their sum of
   exp(score), and the largest score of each group of 128.
2. `pick_kernel`: one program per row. Greedy rows and rows with only a temperature end here: the
   chunk where the running sum passes the number is read again. For a row with min-p, top-k or
   top-p it finds a threshold: the r-th largest of the groups' largest scores, so that at least r
   tokens reach it, and rarely many more. It lists the groups with such tokens.
3. `gather_kernel`: collects the tokens that reach the threshold, the candidates.
4. `settle_kernel`: one program per row. Top-k, top-p and the draw itself each ask where a sum (of
   ones or of probabilities) over tokens in descending order passes a goal. A bisection over keys
   answers; keys order all tokens strictly, by score, ties by token id. Nearly every row ends here,
   because the candidates suffice.
5. `bracket_kernel`, for rows with a flat distribution: estimates from a sample of the row's tokens
   between which two keys each answer lies, within five standard deviations (Floyd and Rivest,
   "Expected Time Bounds for Selection", with probabilities in place of ranks).
6. `collect_kernel`: computes the exact sums above these brackets, and lists the tokens inside.
7. `finish_kernel`: searches the lists as step 4 searches the candidates. If an answer lies outside
   its bracket, or a list is too long, it searches the whole row: the same answer, much more slowly.

Steps 1 and 2 are in pick.py, 3 and 4 in search.py, the others in brackets.py.

The sequence of launches is fixed; programs of finished rows return at once. Sums that depend on
the order in which programs run are integer sums.

A batch runs as one of three variants; each can do everything that the ones before it can.
"""

from __future__ import annotations

from typing import Literal

import torch

from aquifer.kernels._triton import launch_options, pow2, runs_triton
from aquifer.kernels.sampling.brackets import bracket_kernel, collect_kernel, finish_kernel
from aquifer.kernels.sampling.columns import GREEDY_BELOW, IN_PROMPT, SamplingColumns
from aquifer.kernels.sampling.host import sample_host
from aquifer.kernels.sampling.pick import chunk_kernel, pick_kernel
from aquifer.kernels.sampling.search import gather_kernel, settle_kernel

Variant = Literal["greedy", "plain", "full"]
"""Sampling operations that a batch needs: "plain" if any temperature is not 0, "full" if any row
has a penalty, min-p, top-k or top-p. Chosen on the host, from the rows in the batch."""

_GROUP = 128  # tokens in a group; its largest score is kept
_GROUPS = 32  # groups in a chunk
CHUNK = _GROUP * _GROUPS
_RANK = 256  # minimum number of candidates
CANDIDATES = 4096  # maximum number of candidates
_SAMPLE = 4096  # tokens of a row sampled by `bracket_kernel`
DEVIATIONS = 5.0  # half-width of brackets: one row in a million lies outside
LIST_SHARE = 8  # a list holds 1/8 of the vocabulary; brackets need up to a tenth
_LIST_BLOCK = 1024  # list entries searched at once
_UNIT = 2.0**44  # probabilities are integers: multiples of the row's largest over this
MAX_VOCAB = (1 << 19) - 1
"""The largest vocabulary, so that the sum of a row is below 2^63."""


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
    *,
    variant: Variant = "full",
) -> None:
    """Sample a token for each row, and count it for rows with penalties.

    Ties are ordered by token id, lowest first.

    Args:
        logits: [B, vocab], any row stride; not modified.
        slots: [B] int64, the slot of each row; below 0 for padding, which is skipped. No slot
            twice.
        num_tokens: [B] int64, the known tokens of each row: the position of the one to be drawn.
        columns: the sampling parameters.
        out: [B] int64, overwritten except for padding.
        variant: see `Variant`; it decides which kernels run. The CPU path ignores it and reads the
            columns.
    """
    batch, vocab_size = logits.shape
    assert slots.shape == num_tokens.shape == out.shape == (batch,)
    assert columns.counts.shape[1] == vocab_size <= MAX_VOCAB
    assert logits.stride(1) == 1
    if not runs_triton(logits):
        sample_host(logits, slots, num_tokens, columns, out)
        return
    if batch == 0:
        return
    num_chunks = -(-vocab_size // CHUNK)
    greedy, full = variant == "greedy", variant == "full"

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=logits.device)

    best = scratch(num_chunks, dtype=torch.float32)
    best_id = scratch(num_chunks, dtype=torch.int32)
    mass = scratch(num_chunks if not greedy else 0, dtype=torch.float64)
    groups = scratch(num_chunks * _GROUPS if full else 0, dtype=torch.float32)
    chosen = scratch(num_chunks * _GROUPS if full else 0, dtype=torch.int32)
    num_chosen = scratch(dtype=torch.int32)
    pending = scratch(dtype=torch.int32)
    threshold = scratch(dtype=torch.float32)
    row_best = scratch(dtype=torch.float32)
    row_mass = scratch(dtype=torch.float64)
    lengths = scratch(2, dtype=torch.int32)
    # Arguments for loading scores and drawing, common to all kernels.
    source = (
        logits, logits.stride(0), vocab_size, slots, num_tokens,
        columns.floats, columns.ints, columns.floats.shape[1], columns.counts,
    )  # fmt: skip
    chunk_kernel[(batch, num_chunks)](
        *source, best, best_id, mass, groups,
        num_groups=_GROUPS, group=_GROUP, in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW,
        greedy=greedy, full=full, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip
    pick_kernel[(batch,)](
        *source, best, best_id, mass, groups,
        chosen, num_chosen, pending, threshold, row_best, row_mass, lengths, out, num_chunks,
        chunks_pow2=pow2(num_chunks), chunk=CHUNK, groups_pow2=pow2(num_chunks * _GROUPS),
        num_groups=_GROUPS, group=_GROUP, rank=_RANK, limit=CANDIDATES,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, greedy=greedy, full=full, num_warps=8,
        **launch_options(logits.device),
    )  # fmt: skip
    if not full:
        return
    capacity = max(-(-vocab_size // (LIST_SHARE * 64)) * 64, CANDIDATES)
    # The candidates use the memory of the first list.
    list_scores = scratch(2, capacity, dtype=torch.float32)
    list_ids = scratch(2, capacity, dtype=torch.int32)
    row_head = scratch(dtype=torch.int64)
    brackets = scratch(4, dtype=torch.int64)
    sums = scratch(4, dtype=torch.int64)
    gather_kernel[(batch, num_chunks)](
        *source, pending, chosen, num_chosen, threshold, lengths, list_scores, list_ids, capacity,
        num_groups=_GROUPS, group=_GROUP, limit=CANDIDATES,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip
    settle_kernel[(batch,)](
        *source, pending, threshold, row_best, row_mass, row_head, lengths,
        list_scores, list_ids, capacity, out,
        limit=CANDIDATES, block=_LIST_BLOCK, unit=_UNIT,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip
    bracket_kernel[(batch,)](
        *source, pending, threshold, row_best, row_mass, row_head, lengths, brackets, sums,
        limit=CANDIDATES, sample=_SAMPLE, deviations=DEVIATIONS, unit=_UNIT,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=16,
    )  # fmt: skip
    collect_kernel[(batch, num_chunks)](
        *source, pending, row_best, mass, lengths, brackets, sums,
        list_scores, list_ids, capacity,
        chunk=CHUNK, unit=_UNIT, in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=16,
    )  # fmt: skip
    finish_kernel[(batch,)](
        *source, pending, row_best, mass, lengths, brackets, sums,
        list_scores, list_ids, capacity, out, num_chunks,
        chunks_pow2=pow2(num_chunks), chunk=CHUNK, block=_LIST_BLOCK, unit=_UNIT,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip
