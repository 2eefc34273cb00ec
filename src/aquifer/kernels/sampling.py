"""Sampling: from logits to token ids, on the device without host synchronisation.

The order of operations is vLLM's: penalties, temperature, min-p, top-k, top-p, then the inverse CDF
at one Philox number, which depends only on the request's seed and the token's position.
`sample_reference` is the specification, `sampling_host.py` the CPU path. The device never sorts
the vocabulary:

1. `_chunk_kernel`: one program per 4096 tokens of a row finds their largest score, their sum of
   exp(score), and the largest score of each group of 128.
2. `_pick_kernel`: one program per row. Greedy rows and rows with only a temperature end here: the
   chunk where the running sum passes the number is read again. For a row with min-p, top-k or
   top-p it finds a threshold: the r-th largest of the groups' largest scores, so that at least r
   tokens reach it, and rarely many more. It lists the groups with such tokens.
3. `_gather_kernel`: collects the tokens that reach the threshold, the candidates.
4. `_settle_kernel`: one program per row. Top-k, top-p and the draw itself each ask where a sum (of
   ones or of probabilities) over tokens in descending order passes a goal. A bisection over keys
   answers; keys order all tokens strictly, by score, ties by token id. Nearly every row ends here,
   because the candidates suffice.
5. `_bracket_kernel`, for rows with a flat distribution: estimates from a sample of the row's tokens
   between which two keys each answer lies, within five standard deviations (Floyd and Rivest,
   "Expected Time Bounds for Selection", with probabilities in place of ranks).
6. `_collect_kernel`: computes the exact sums above these brackets, and lists the tokens inside.
7. `_finish_kernel`: searches the lists as step 4 searches the candidates. If an answer lies outside
   its bracket, or a list is too long, it searches the whole row: the same answer, much more slowly.

The sequence of launches is fixed; programs of finished rows return at once. Sums that depend on
the order in which programs run are integer sums.

A batch runs as one of three variants; each can do everything that the ones before it can.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit,
    jit_once,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.sampling_columns import GREEDY_BELOW, IN_PROMPT, SamplingColumns
from aquifer.kernels.sampling_host import sample_host

Variant = Literal["greedy", "plain", "full"]
"""Sampling operations that a batch needs: "plain" if any temperature is not 0, "full" if any row
has a penalty, min-p, top-k or top-p. Chosen on the host, from the rows in the batch."""

_GROUP = 128  # tokens in a group; its largest score is kept
_GROUPS = 32  # groups in a chunk
CHUNK = _GROUP * _GROUPS
_RANK = 256  # minimum number of candidates
CANDIDATES = 4096  # maximum number of candidates
_SAMPLE = 4096  # tokens of a row sampled by `_bracket_kernel`
DEVIATIONS = 5.0  # half-width of brackets: one row in a million lies outside
LIST_SHARE = 8  # a list holds 1/8 of the vocabulary; brackets need up to a tenth
_LIST_BLOCK = 1024  # list entries searched at once
_UNIT = 2.0**44  # probabilities are integers: multiples of the row's largest over this
_MAX_VOCAB = (1 << 19) - 1  # so that the sum of a row is below 2^63
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def sample_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
) -> None:
    """`sample` in plain torch, in float64, row by row."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        scores = logits[row].float()
        counts_row = int(columns.counts_row[slot])
        if counts_row >= 0:
            repetition, presence, frequency = columns.floats[3:, slot]
            counts = columns.counts[counts_row]
            changed = torch.where(scores > 0, scores / repetition, scores * repetition)
            scores = torch.where(counts != 0, changed, scores)
            output = counts % IN_PROMPT
            scores = torch.where(output > 0, scores - (presence + frequency * output), scores)
        temperature = float(columns.temperature[slot])
        if temperature < GREEDY_BELOW:
            token = int(scores.argmax())
        else:
            number = number_reference(int(columns.seed[slot]), int(num_tokens[row]))
            token = _draw_reference(scores / temperature, number, slot, columns)
        out[row] = token
        if counts_row >= 0:
            columns.counts[counts_row, token] += 1


def _draw_reference(
    scores: torch.Tensor, number: float, slot: int, columns: SamplingColumns
) -> int:
    """Draw a token for one row, [vocab], which is sorted if it has top-k or top-p."""
    weights = (scores.double() - scores.max()).exp()
    weights = torch.where(weights < columns.min_p[slot], 0.0, weights)
    ids = torch.arange(len(weights), device=weights.device)
    top_k, top_p = int(columns.top_k[slot]), columns.top_p[slot]
    if 0 < top_k < len(weights) or top_p < 1:
        weights, ids = weights.sort(descending=True, stable=True)
        if top_k > 0:
            weights[top_k:] = 0
        before = weights.cumsum(0) - weights
        weights = torch.where(before < top_p * weights.sum(), weights, 0.0)
    sums = weights.cumsum(0)
    column = min(int((sums <= number * sums[-1]).sum()), int(weights.nonzero()[-1]))
    return int(ids[column])


def number_reference(seed: int, counter: int) -> float:
    """Return one number in [0, 1): Philox4x32-10 with this key and counter, see philox.py."""
    c = [counter & _LOW, (counter >> 32) & _LOW, 0, 0]
    k = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(10):
        high0, low0 = divmod(_PHILOX_MULTIPLIERS[0] * c[0], 1 << 32)
        high1, low1 = divmod(_PHILOX_MULTIPLIERS[1] * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(part + step) & _LOW for part, step in zip(k, _PHILOX_KEY_STEPS, strict=True)]
    return math.ldexp((c[0] << 32 | c[1]) >> 11, -53)


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
    assert columns.counts.shape[1] == vocab_size <= _MAX_VOCAB
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
    _chunk_kernel[(batch, num_chunks)](
        *source, best, best_id, mass, groups,
        num_groups=_GROUPS, group=_GROUP, in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW,
        greedy=greedy, full=full, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip
    _pick_kernel[(batch,)](
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
    _gather_kernel[(batch, num_chunks)](
        *source, pending, chosen, num_chosen, threshold, lengths, list_scores, list_ids, capacity,
        num_groups=_GROUPS, group=_GROUP, limit=CANDIDATES,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip
    _settle_kernel[(batch,)](
        *source, pending, threshold, row_best, row_mass, row_head, lengths,
        list_scores, list_ids, capacity, out,
        limit=CANDIDATES, block=_LIST_BLOCK, unit=_UNIT,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip
    _bracket_kernel[(batch,)](
        *source, pending, threshold, row_best, row_mass, row_head, lengths, brackets, sums,
        limit=CANDIDATES, sample=_SAMPLE, deviations=DEVIATIONS, unit=_UNIT,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=16,
    )  # fmt: skip
    _collect_kernel[(batch, num_chunks)](
        *source, pending, row_best, mass, lengths, brackets, sums,
        list_scores, list_ids, capacity,
        chunk=CHUNK, unit=_UNIT, in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=16,
    )  # fmt: skip
    _finish_kernel[(batch,)](
        *source, pending, row_best, mass, lengths, brackets, sums,
        list_scores, list_ids, capacity, out, num_chunks,
        chunks_pow2=pow2(num_chunks), chunk=CHUNK, block=_LIST_BLOCK, unit=_UNIT,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=8,
    )  # fmt: skip


@jit_once(indices=("slots",))
def _chunk_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    best: tensor,
    best_id: tensor,
    mass: tensor,
    groups: tensor,
    num_groups: constexpr,
    group: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
    greedy: constexpr,
    full: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        # [num_groups, group]
        ids = (chunk * num_groups + tl.arange(0, num_groups)[:, None]) * group
        ids += tl.arange(0, group)[None, :]
        scores = load_scores(
            ids, logits + row * logits_stride, vocab_size, slot, floats, ints, num_slots, counts,
            in_prompt, greedy_below, greedy, full,
        )  # fmt: skip
        group_best = tl.max(scores, axis=1)
        chunk_best = tl.max(group_best, axis=0)
        is_best = tl.where(scores == chunk_best, ids, 0x7FFFFFFF)
        tl.store(best + row * num_chunks + chunk, chunk_best)
        tl.store(best_id + row * num_chunks + chunk, tl.min(tl.min(is_best, axis=1), axis=0))
        if not greedy:
            # A chunk may be all -inf.
            shift = tl.where(chunk_best == float("-inf"), 0.0, chunk_best)
            weights = tl.exp(scores - shift).to(tl.float64)
            tl.store(mass + row * num_chunks + chunk, tl.sum(tl.sum(weights, axis=1), axis=0))
        if full:
            index = (row * num_chunks + chunk) * num_groups + tl.arange(0, num_groups)
            tl.store(groups + index, group_best)


@jit
def load_scores(
    ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    greedy: constexpr,
    full: constexpr,
) -> tensor:
    """Penalised logits of one row over its temperature, at `ids`; -inf beyond the vocabulary."""
    inside = ids < vocab_size
    scores = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if full:
        counted = tl.load(ints + 2 * num_slots + slot)
        if counted >= 0:
            repetition = tl.load(floats + 3 * num_slots + slot)
            presence = tl.load(floats + 4 * num_slots + slot)
            frequency = tl.load(floats + 5 * num_slots + slot)
            known = tl.load(counts + counted * vocab_size + ids, mask=inside, other=0)
            changed = tl.where(scores > 0, scores / repetition, scores * repetition)
            scores = tl.where(known != 0, changed, scores)
            times = known % in_prompt
            scores = tl.where(times > 0, scores - (presence + frequency * times), scores)
    if not greedy:
        divisor = tl.load(floats + slot)
        scores = scores * (1.0 / tl.where(divisor < greedy_below, 1.0, divisor))
    return scores


@jit
def _cuts(
    slot: tensor, vocab_size: tensor, floats: tensor, ints: tensor, num_slots: tensor
) -> tensor:
    """Return (top-k, or 0 if it keeps all tokens; top-p in float64; min-p)."""
    k = tl.load(ints + slot)
    p = tl.load(floats + num_slots + slot).to(tl.float64)
    m = tl.load(floats + 2 * num_slots + slot)
    return tl.where(k < vocab_size, k, 0), p, m


@jit_once(indices=("slots", "num_tokens"))
def _pick_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    best: tensor,
    best_id: tensor,
    mass: tensor,
    groups: tensor,
    chosen: tensor,
    num_chosen: tensor,
    pending: tensor,
    threshold: tensor,
    row_best: tensor,
    row_mass: tensor,
    lengths: tensor,
    out: tensor,
    num_chunks: tensor,
    chunks_pow2: constexpr,
    chunk: constexpr,
    groups_pow2: constexpr,
    num_groups: constexpr,
    group: constexpr,
    rank: constexpr,
    limit: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
    greedy: constexpr,
    full: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    is_pending = 0
    if slot >= 0:
        chunks = tl.arange(0, chunks_pow2)
        inside = chunks < num_chunks
        maxima = tl.load(best + row * num_chunks + chunks, mask=inside, other=float("-inf"))
        top = tl.max(maxima, axis=0)
        is_greedy = True
        if not greedy:
            is_greedy = tl.load(floats + slot) < greedy_below
        is_cut = False
        k = tl.cast(0, tl.int64)
        if full:
            k, p, m = _cuts(slot, vocab_size, floats, ints, num_slots)
            is_cut = (k > 0) | (p < 1) | (m > 0)
        if is_greedy:
            first = tl.load(best_id + row * num_chunks + chunks, mask=inside, other=0x7FFFFFFF)
            greedy_token = tl.min(tl.where(maxima == top, first, 0x7FFFFFFF), axis=0)
            _put(greedy_token, row, slot, vocab_size, ints, num_slots, counts, out, full)
        elif not greedy:
            sums = tl.load(mass + row * num_chunks + chunks, mask=inside, other=0.0)
            sums *= tl.exp(maxima - top).to(tl.float64)
            if is_cut:
                is_pending = 1
                tl.store(row_best + row, top)
                tl.store(row_mass + row, tl.sum(sums, axis=0))
                tl.store(lengths + 2 * row, 0)
                index = tl.arange(0, groups_pow2)
                end = num_chunks * num_groups
                values = tl.load(groups + row * end + index, mask=index < end, other=float("-inf"))
                wanted = tl.minimum(tl.maximum(k, rank), tl.cdiv(vocab_size, group))
                candidates_from = _nth_largest(values, wanted)
                candidates_from = tl.where(vocab_size <= limit, float("-inf"), candidates_from)
                tl.store(threshold + row, candidates_from)
                has_candidates = (values >= candidates_from) & (index < end)
                ones = has_candidates.to(tl.int32)
                place = row * end + tl.cumsum(ones, axis=0) - 1
                tl.store(chosen + place, index, mask=has_candidates)
                tl.store(num_chosen + row, tl.sum(ones, axis=0))
            else:
                number = draw_number(slot, row, num_tokens, ints, num_slots)
                token = _pick_by_id(
                    number, sums, chunks, top, 0.0, chunk,
                    logits + row * logits_stride, vocab_size, slot, floats, ints, num_slots, counts,
                    in_prompt, greedy_below, full,
                )  # fmt: skip
                _put(token, row, slot, vocab_size, ints, num_slots, counts, out, full)
    if full:
        tl.store(pending + row, is_pending)


@jit
def _pick_by_id(
    number: tensor,
    sums: tensor,
    chunks: tensor,
    top: tensor,
    m: tensor,
    chunk: constexpr,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    full: constexpr,
) -> tensor:
    """Find the token where the running sum in the order of ids passes `number` of the total.

    `sums` has the sum of each of `chunks`, over exp(score - top) where that is at least `m`. First
    the chunk is found, then the token in it.
    """
    running = tl.cumsum(sums, axis=0)
    goal = number * tl.sum(sums, axis=0)
    which = first_above(running, sums, chunks, goal)
    goal -= tl.sum(tl.where(chunks < which, sums, 0.0), axis=0)
    offsets = tl.arange(0, chunk)
    scores = load_scores(
        which * chunk + offsets,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        False, full,
    )  # fmt: skip
    weights = tl.exp(scores - top)
    weights = tl.where(weights >= m, weights, 0.0).to(tl.float64)
    return which * chunk + first_above(tl.cumsum(weights, axis=0), weights, offsets, goal)


@jit
def first_above(running: tensor, weights: tensor, index: tensor, goal: tensor) -> tensor:
    """Index where the running sum passes the goal; at most the last with a positive weight."""
    place = tl.sum((running <= goal).to(tl.int32), axis=0)
    return tl.minimum(place, tl.max(tl.where(weights > 0, index, 0), axis=0))


@jit
def _put(
    token: tensor,
    row: tensor,
    slot: tensor,
    vocab_size: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    out: tensor,
    full: constexpr,
) -> None:
    """Store a token, clamped to the vocabulary in case all logits are NaN, and count it."""
    valid = tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int64)
    tl.store(out + row, valid)
    if full:
        counted = tl.load(ints + 2 * num_slots + slot)
        if counted >= 0:
            place = counts + counted * vocab_size + valid
            tl.store(place, tl.load(place) + 1)


@jit
def draw_number(
    slot: tensor, row: tensor, num_tokens: tensor, ints: tensor, num_slots: tensor
) -> tensor:
    """Return the number in [0, 1) of `aquifer.kernels.philox.uniform`."""
    counter = tl.load(num_tokens + row)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (counter * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(tl.load(ints + num_slots + slot), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@jit
def _ordered(scores: tensor) -> tensor:
    """Map scores to int64 in [0, 2^32), preserving their order."""
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 0x80000000, -1 - bits)


@jit
def _nth_largest(values: tensor, n: tensor) -> tensor:
    """Return the n-th largest value, by bisection; both ends are always keys of values."""
    keys = _ordered(values)
    low = tl.min(keys, axis=0)
    high = tl.max(keys, axis=0)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if tl.sum((keys >= middle).to(tl.int32), axis=0) >= n:
            low = tl.min(tl.where(keys >= middle, keys, high), axis=0)
        else:
            high = tl.max(tl.where(keys < middle, keys, low), axis=0)
    return tl.max(tl.where(keys == low, values, float("-inf")), axis=0)


@jit_once(indices=("slots",))
def _gather_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    pending: tensor,
    chosen: tensor,
    num_chosen: tensor,
    threshold: tensor,
    lengths: tensor,
    list_scores: tensor,
    list_ids: tensor,
    capacity: tensor,
    num_groups: constexpr,
    group: constexpr,
    limit: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_groups
    if tl.load(pending + row) != 0:
        num_here = tl.load(num_chosen + row) - first
        if num_here > 0:
            slot = tl.load(slots + row)
            offsets = tl.arange(0, num_groups * group)
            which = offsets // group
            which_id = tl.load(
                chosen + row * tl.num_programs(1) * num_groups + first + which,
                mask=which < num_here, other=0x7FFFFF,
            )  # fmt: skip
            ids = which_id * group + offsets % group
            scores = load_scores(
                ids, logits + row * logits_stride, vocab_size, slot,
                floats, ints, num_slots, counts, in_prompt, greedy_below, False, True,
            )  # fmt: skip
            is_candidate = (scores >= tl.load(threshold + row)) & (ids < vocab_size)
            _append(
                is_candidate, scores, ids, lengths + 2 * row,
                list_scores + 2 * row * capacity, list_ids + 2 * row * capacity, limit,
            )  # fmt: skip


@jit
def _append(
    is_member: tensor,
    scores: tensor,
    ids: tensor,
    length: tensor,
    list_scores: tensor,
    list_ids: tensor,
    limit: tensor,
) -> None:
    """Append members to a list, in any order; its length also counts those that do not fit."""
    ones = is_member.to(tl.int32)
    count = tl.sum(ones, axis=0)
    if count > 0:
        place = tl.atomic_add(length, count) + tl.cumsum(ones, axis=0) - 1
        has_room = is_member & (place < limit)
        tl.store(list_scores + place, scores, mask=has_room)
        tl.store(list_ids + place, ids, mask=has_room)


@jit_once(indices=("slots", "num_tokens"))
def _settle_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    pending: tensor,
    threshold: tensor,
    row_best: tensor,
    row_mass: tensor,
    row_head: tensor,
    lengths: tensor,
    list_scores: tensor,
    list_ids: tensor,
    capacity: tensor,
    out: tensor,
    limit: constexpr,
    block: constexpr,
    unit: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        top = tl.load(row_best + row)
        count = tl.load(lengths + 2 * row)
        k, p, m = _cuts(slot, vocab_size, floats, ints, num_slots)
        # Without min-p and top-k, top-p is a fraction of the whole row's mass.
        of_all = (k == 0) & (m == 0)
        whole = tl.load(row_mass + row) * unit
        # With min-p alone, a token is drawn in the order of ids, as without any cut.
        by_id = (k == 0) & (p >= 1)

        logits += row * logits_stride
        list_scores += 2 * row * capacity
        list_ids += 2 * row * capacity
        length = tl.minimum(count, limit)
        head, _, _ = _scan(
            tl.cast(0, tl.int64), length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        # Whether the candidates include all tokens of min-p, or of top-k, or enough for top-p.
        is_enough = (tl.exp(tl.load(threshold + row) - top) < m) | ((k > 0) & (k <= count))
        is_enough = (is_enough | (of_all & (head.to(tl.float64) >= p * whole))) & (count <= limit)
        if is_enough:
            key = _draw(
                draw_number(slot, row, num_tokens, ints, num_slots), k, p, of_all, whole,
                length, top, m, by_id, list_scores, list_ids,
                logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
                block, unit, True,
            )  # fmt: skip
            _put(_id_of(key), row, slot, vocab_size, ints, num_slots, counts, out, True)
            tl.store(pending + row, 0)
        else:
            tl.store(row_head + row, head)


@jit
def _draw(
    number: tensor,
    k: tensor,
    p: tensor,
    of_all: tensor,
    whole: tensor,
    length: tensor,
    top: tensor,
    m: tensor,
    by_id: tensor,
    list_scores: tensor,
    list_ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    unit: constexpr,
    from_list: constexpr,
) -> tensor:
    """Draw a token and return its key, from a list of `length` tokens or from the whole row.

    `whole`, the sum over the whole row, is used only if top-p is a fraction `of_all`.
    """
    floor = tl.cast(0, tl.int64)  # the smallest key kept by top-k, then by top-p
    if k > 0:
        floor = _search(
            k.to(tl.float64), floor, length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, from_list, True,
        )  # fmt: skip
    if p < 1:
        left = whole
        if not of_all:
            sums, _, _ = _scan(
                floor, length, top, m, by_id, list_scores, list_ids,
                logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
                block, unit, from_list, False,
            )  # fmt: skip
            left = sums.to(tl.float64)
        floor = _search(
            p * left, floor, length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, from_list, False,
        )  # fmt: skip
    kept, _, _ = _scan(
        floor, length, top, m, by_id, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, from_list, False,
    )  # fmt: skip
    return _search(
        tl.maximum(number * kept.to(tl.float64), 1.0), floor,
        length, top, m, by_id, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, from_list, False,
    )  # fmt: skip


@jit
def _search(
    goal: tensor,
    low: tensor,
    length: tensor,
    top: tensor,
    m: tensor,
    by_id: tensor,
    list_scores: tensor,
    list_ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    unit: constexpr,
    from_list: constexpr,
    counting: constexpr,
) -> tensor:
    """Return the largest key such that tokens (or masses) at or above it sum up to the goal.

    The key is in [low, high]; both ends move to the nearest existing key. Returns `low` if the sum
    at or above `low` is less than the goal.
    """
    high = tl.cast(0x7FFFFFFFFFFFFFFF, tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        total, above, below = _scan(
            middle, length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, from_list, counting,
        )  # fmt: skip
        if total.to(tl.float64) >= goal:
            low = above
        else:
            high = below
    return low


@jit
def _scan(
    middle: tensor,
    length: tensor,
    top: tensor,
    m: tensor,
    by_id: tensor,
    list_scores: tensor,
    list_ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    unit: constexpr,
    from_list: constexpr,
    counting: constexpr,
) -> tensor:
    """Return (sum over keys of at least `middle`, the lowest such key, the highest key below)."""
    largest: constexpr = 0x7FFFFFFFFFFFFFFF
    sums = tl.zeros([block], tl.int64)
    above = tl.full([block], largest, tl.int64)
    below = tl.full([block], -1, tl.int64)
    for start in range(0, length, block):
        place = start + tl.arange(0, block)
        if from_list:
            ids = tl.load(list_ids + place, mask=place < length, other=0)
            scores = tl.load(list_scores + place, mask=place < length, other=float("-inf"))
        else:
            ids = place
            scores = load_scores(
                ids,
                logits, vocab_size, slot, floats, ints, num_slots, counts,
                in_prompt, greedy_below, False, True,
            )  # fmt: skip
        keys, masses = _weigh(scores, ids, top, m, by_id, unit)
        is_above = keys >= middle
        if counting:
            sums += tl.where(is_above, 1, 0)
        else:
            sums += tl.where(is_above, masses, 0)
        above = tl.minimum(above, tl.where(is_above, keys, largest))
        below = tl.maximum(below, tl.where(is_above, -1, keys))
    return tl.sum(sums, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@jit
def _weigh(
    scores: tensor, ids: tensor, top: tensor, m: tensor, by_id: tensor, unit: constexpr
) -> tensor:
    """Return (keys, -1 for tokens excluded by min-p; masses, exp(score - top) in whole units)."""
    weights = tl.exp(scores - top)
    allowed = (weights > 0) & (weights >= m)
    keys = (tl.where(by_id, 0, _ordered(scores)) << 31) | (0x7FFFFFFF - ids).to(tl.int64)
    masses = tl.where(allowed, weights, 0.0) * unit
    return tl.where(allowed, keys, -1), masses.to(tl.int64)


@jit
def _id_of(key: tensor) -> tensor:
    """Return the token id of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@jit_once(indices=("slots", "num_tokens"))
def _bracket_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    pending: tensor,
    threshold: tensor,
    row_best: tensor,
    row_mass: tensor,
    row_head: tensor,
    lengths: tensor,
    brackets: tensor,
    sums: tensor,
    limit: constexpr,
    sample: constexpr,
    deviations: constexpr,
    unit: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    largest: constexpr = 0x7FFFFFFFFFFFFFFF
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        k, p, m = _cuts(slot, vocab_size, floats, ints, num_slots)
        # Both brackets are [from, to) in keys.
        cut_from = tl.cast(0, tl.int64)
        cut_to = tl.cast(largest, tl.int64)
        draw_from = cut_from
        draw_to = cut_to
        if (vocab_size > sample) & ((k > 0) | (p < 1)):
            top = tl.load(row_best + row)
            number = draw_number(slot, row, num_tokens, ints, num_slots)
            index = tl.arange(0, sample)
            ids = (index.to(tl.int64) * vocab_size // sample).to(tl.int32)
            scores = load_scores(
                ids, logits + row * logits_stride, vocab_size, slot,
                floats, ints, num_slots, counts, in_prompt, greedy_below, False, True,
            )  # fmt: skip
            keys, masses = _weigh(scores, ids, top, m, False, unit)
            # Candidates are known exactly; the sample represents the tokens below them. All that
            # follows is in units of the sample: one of its tokens represents `share` tokens.
            share = tl.cast(vocab_size, tl.float64) / sample
            count = tl.load(lengths + 2 * row)
            head = tl.cast(0.0, tl.float64)
            head_count = head
            head_from = tl.cast(largest, tl.int64)
            if count <= limit:
                head = tl.load(row_head + row).to(tl.float64) / share
                head_count = count / share
                head_from = _ordered(tl.load(threshold + row)) << 31
            in_tail = (keys >= 0) & (keys < head_from)
            keys = tl.where(in_tail, keys, -1)
            values = tl.where(in_tail, masses, 0).to(tl.float32)
            of_all = (k == 0) & (m == 0)
            tail = tl.load(row_mass + row) * unit / share - head

            # Keys from `inside_from` on are in top-k with certainty, those below `outside_from`
            # are not.
            outside_from = tl.cast(0, tl.int64)
            inside_from = tl.cast(0, tl.int64)
            cut_from = tl.cast(largest, tl.int64)
            cut_to = tl.cast(0, tl.int64)
            if k > 0:
                fraction = (k / share - head_count) / sample
                ones = tl.full([sample], 1.0, tl.float32)
                inside_from = _bracket_end(
                    fraction, keys, ones, -1, 0.0, sample * 1.0, True, head_from, deviations, True
                )
                outside_from = _bracket_end(
                    fraction, keys, ones, -1, 0.0, sample * 1.0, True, head_from, deviations, False
                )
                cut_from = outside_from
                cut_to = inside_from
            if p < 1:
                end = _bracket_end(
                    p, keys, values, inside_from, head, tail, of_all, head_from, deviations, True
                )
                cut_to = tl.maximum(cut_to, end)
                end = _bracket_end(
                    p, keys, values, outside_from, head, tail, of_all, head_from, deviations, False
                )
                cut_from = tl.minimum(cut_from, end)
            fraction = number * tl.minimum(p, 1.0)
            draw_to = _bracket_end(
                fraction, keys, values, inside_from, head, tail, of_all,
                head_from, deviations, True,
            )  # fmt: skip
            draw_from = _bracket_end(
                fraction, keys, values, outside_from, head, tail, of_all,
                head_from, deviations, False,
            )  # fmt: skip
        tl.store(brackets + 4 * row, cut_from)
        tl.store(brackets + 4 * row + 1, cut_to)
        tl.store(brackets + 4 * row + 2, draw_from)
        tl.store(brackets + 4 * row + 3, draw_to)
        tl.store(sums + 4 * row + tl.arange(0, 4), tl.zeros([4], tl.int64))
        tl.store(lengths + 2 * row + tl.arange(0, 2), tl.zeros([2], tl.int32))


@jit
def _bracket_end(
    fraction: tensor,
    keys: tensor,
    values: tensor,
    least: tensor,
    head: tensor,
    tail: tensor,
    is_known: tensor,
    head_from: tensor,
    deviations: constexpr,
    is_upper: constexpr,
) -> tensor:
    """Return one end of the bracket of keys where the sum from above reaches a fraction of all.

    "All" is `head`, the mass above the sample, plus `tail` if that is known, else plus the sample's
    estimate of it. Only keys of at least `least` belong to it.

    Let A be the sum of the sample above a key and B below it, Q_A and Q_B the sums of squares. For
    any a + b = 1, A + b (tail - A - B) = a A + b (tail - B) estimates the sum above the key, with
    variance a^2 Q_A + b^2 Q_B, because the tokens in a sample are nearly Poisson distributed. It is
    least for a = Q_B / (Q_A + Q_B). If the tail is not known, the estimated quantity is A minus the
    fraction of A + B, with the same variance for b = fraction. The margin is Wilson's, which takes
    the variance at the true value instead of at the estimate. For it, a token weighs the average of
    those above and below, with the same weights a and b.
    """
    largest: constexpr = 0x7FFFFFFFFFFFFFFF
    values = tl.where(keys >= least, values, 0.0)
    squares = values * values
    sampled = tl.sum(values, axis=0).to(tl.float64)
    missing = tl.where(is_known, tail - sampled, 0.0)
    goal = fraction * (head + sampled + missing) - head
    low = tl.cast(0, tl.int64)
    high = tl.cast(largest, tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        is_above = keys >= middle
        above = tl.sum(tl.where(is_above, values, 0.0), axis=0).to(tl.float64)
        below = tl.sum(tl.where(is_above, 0.0, values), axis=0).to(tl.float64)
        above_squares = tl.sum(tl.where(is_above, squares, 0.0), axis=0).to(tl.float64)
        below_squares = tl.sum(tl.where(is_above, 0.0, squares), axis=0).to(tl.float64)
        a = below_squares / tl.maximum(above_squares + below_squares, 1e-300)
        a = tl.where(is_known, a, 1 - fraction)
        b = 1 - a
        variance = a * a * above_squares + b * b * below_squares
        typical = a * above_squares / tl.maximum(above, 1e-300)
        typical += b * below_squares / tl.maximum(below, 1e-300)
        half = deviations * typical / 2
        margin = deviations * (tl.sqrt(variance + half * half) + half)
        estimate = above + b * missing
        if is_upper:
            estimate += margin
        else:
            estimate -= margin
        if estimate >= goal:
            low = tl.min(tl.where(is_above, keys, largest), axis=0)
        else:
            high = tl.max(tl.where(is_above, -1, keys), axis=0)
    # `low` is the first key of the sample that reaches the goal; 0 if none does, and `largest` if
    # the head alone does. Keys of other tokens lie between the head and the sample, and below it.
    if is_upper:
        end = tl.where((low == 0) | (low == tl.max(keys, axis=0)), head_from, low + 1)
        end = tl.where(low == largest, largest, end)
    else:
        last = tl.min(tl.where(keys >= 0, keys, largest), axis=0)
        end = tl.maximum(tl.where(low == last, 0, low), least)
        end = tl.where(low == largest, head_from, end)
    return end


@jit_once(indices=("slots", "num_tokens"))
def _collect_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    pending: tensor,
    row_best: tensor,
    mass: tensor,
    lengths: tensor,
    brackets: tensor,
    sums: tensor,
    list_scores: tensor,
    list_ids: tensor,
    capacity: tensor,
    chunk: constexpr,
    unit: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        k, p, m = _cuts(slot, vocab_size, floats, ints, num_slots)
        top = tl.load(row_best + row)
        ids = number * chunk + tl.arange(0, chunk)
        scores = load_scores(
            ids, logits + row * logits_stride, vocab_size, slot,
            floats, ints, num_slots, counts, in_prompt, greedy_below, False, True,
        )  # fmt: skip
        if (k == 0) & (p >= 1):  # min-p alone: drawn in the order of ids
            weights = tl.exp(scores - top)
            weights = tl.where(weights >= m, weights, 0.0).to(tl.float64)
            tl.store(mass + row * tl.num_programs(1) + number, tl.sum(weights, axis=0))
        else:
            keys, masses = _weigh(scores, ids, top, m, False, unit)
            cut_from = tl.load(brackets + 4 * row)
            cut_to = tl.load(brackets + 4 * row + 1)
            draw_from = tl.load(brackets + 4 * row + 2)
            draw_to = tl.load(brackets + 4 * row + 3)
            above_cut = keys >= cut_to
            above_draw = keys >= draw_to
            tl.atomic_add(sums + 4 * row, tl.sum(masses, axis=0))
            tl.atomic_add(sums + 4 * row + 1, tl.sum(above_cut.to(tl.int64), axis=0))
            tl.atomic_add(sums + 4 * row + 2, tl.sum(tl.where(above_cut, masses, 0), axis=0))
            tl.atomic_add(sums + 4 * row + 3, tl.sum(tl.where(above_draw, masses, 0), axis=0))
            list_scores += 2 * row * capacity
            list_ids += 2 * row * capacity
            _append(
                (keys >= cut_from) & (keys < cut_to), scores, ids, lengths + 2 * row,
                list_scores, list_ids, capacity,
            )  # fmt: skip
            _append(
                (keys >= draw_from) & (keys < draw_to), scores, ids, lengths + 2 * row + 1,
                list_scores + capacity, list_ids + capacity, capacity,
            )  # fmt: skip


@jit_once(indices=("slots", "num_tokens"))
def _finish_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    pending: tensor,
    row_best: tensor,
    mass: tensor,
    lengths: tensor,
    brackets: tensor,
    sums: tensor,
    list_scores: tensor,
    list_ids: tensor,
    capacity: tensor,
    out: tensor,
    num_chunks: tensor,
    chunks_pow2: constexpr,
    chunk: constexpr,
    block: constexpr,
    unit: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        top = tl.load(row_best + row)
        k, p, m = _cuts(slot, vocab_size, floats, ints, num_slots)
        number = draw_number(slot, row, num_tokens, ints, num_slots)
        logits += row * logits_stride
        token = tl.cast(0, tl.int64)
        if (k == 0) & (p >= 1):
            chunks = tl.arange(0, chunks_pow2)
            by_chunk = tl.load(
                mass + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0
            )
            place = _pick_by_id(
                number, by_chunk, chunks, top, m, chunk,
                logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
                True,
            )  # fmt: skip
            token = place.to(tl.int64)
        else:
            key, is_found = _draw_bracketed(
                number, k, p, top, m, lengths + 2 * row, brackets + 4 * row, sums + 4 * row,
                list_scores + 2 * row * capacity, list_ids + 2 * row * capacity, capacity,
                logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
                block, unit,
            )  # fmt: skip
            if not is_found:
                whole = tl.load(sums + 4 * row).to(tl.float64)
                key = _draw(
                    number, k, p, (k == 0) & (m == 0), whole, vocab_size, top, m, False,
                    list_scores, list_ids,
                    logits, vocab_size, slot, floats, ints, num_slots, counts,
                    in_prompt, greedy_below, block, unit, False,
                )  # fmt: skip
            token = _id_of(key)
        _put(token, row, slot, vocab_size, ints, num_slots, counts, out, True)


@jit
def _draw_bracketed(
    number: tensor,
    k: tensor,
    p: tensor,
    top: tensor,
    m: tensor,
    lengths: tensor,
    brackets: tensor,
    sums: tensor,
    list_scores: tensor,
    list_ids: tensor,
    capacity: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    unit: constexpr,
) -> tensor:
    """Draw a token from the lists; return (its key, whether each answer was in its list)."""
    nothing = tl.cast(0, tl.int64)
    kept = tl.load(sums).to(tl.float64)  # mass left after each cut
    count_above = tl.load(sums + 1)
    mass_above = tl.load(sums + 2).to(tl.float64)
    count = tl.load(lengths)
    length = tl.minimum(count, capacity)
    is_found = count <= capacity
    if k > 0:
        goal = (k - count_above).to(tl.float64)
        # There may be fewer tokens than the goal, if the list goes down to the last token.
        is_found = is_found & (goal > 0) & ((goal <= count) | (tl.load(brackets) == 0))
        key = _search(
            goal, nothing, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, True,
        )  # fmt: skip
        inside, _, _ = _scan(
            key, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        kept = mass_above + inside.to(tl.float64)
    if p < 1:
        goal = p * kept - mass_above
        key = _search(
            goal, nothing, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        inside, _, _ = _scan(
            key, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        is_found = is_found & (goal > 0) & (goal <= inside)
        kept = mass_above + inside.to(tl.float64)
    list_scores += capacity
    list_ids += capacity
    count = tl.load(lengths + 1)
    length = tl.minimum(count, capacity)
    goal = tl.maximum(number * kept, 1.0) - tl.load(sums + 3).to(tl.float64)
    key = _search(
        goal, nothing, length, top, m, False, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, True, False,
    )  # fmt: skip
    inside, _, _ = _scan(
        key, length, top, m, False, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, True, False,
    )  # fmt: skip
    is_found = is_found & (count <= capacity) & (goal > 0) & (goal <= inside)
    return key, is_found
