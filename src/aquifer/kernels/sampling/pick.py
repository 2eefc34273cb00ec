"""Greedy rows, rows with only a temperature, and which tokens are candidates for all others."""

from __future__ import annotations

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit,
    jit_once,
    release_successor,
    tensor,
    tl,
)
from aquifer.kernels.sampling.scores import (
    cuts,
    draw_number,
    first_above,
    load_scores,
    ordered,
    put,
)


@jit_once(indices=("slots",))
def chunk_kernel(
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
    """Step 1 of `sample`."""
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
        tl.store(best + row * num_chunks + chunk, chunk_best)
        is_greedy = True
        if not greedy:
            is_greedy = tl.load(floats + slot) < greedy_below
        if is_greedy:
            is_best = tl.where(scores == chunk_best, ids, 0x7FFFFFFF)
            tl.store(best_id + row * num_chunks + chunk, tl.min(tl.min(is_best, axis=1), axis=0))
        elif not greedy:
            # A chunk may be all -inf.
            shift = tl.where(chunk_best == float("-inf"), 0.0, chunk_best)
            # Groups are added up in float32: float64 for each token would take twice the time.
            weights = tl.sum(tl.exp(scores - shift), axis=1).to(tl.float64)
            tl.store(mass + row * num_chunks + chunk, tl.sum(weights, axis=0))
        if full:
            index = (row * num_chunks + chunk) * num_groups + tl.arange(0, num_groups)
            tl.store(groups + index, group_best)


@jit_once(indices=("slots", "num_tokens"))
def pick_kernel(
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
    """Step 2 of `sample`."""
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
            k, p, m = cuts(slot, vocab_size, floats, ints, num_slots)
            is_cut = (k > 0) | (p < 1) | (m > 0)
        if is_greedy:
            first = tl.load(best_id + row * num_chunks + chunks, mask=inside, other=0x7FFFFFFF)
            greedy_token = tl.min(tl.where(maxima == top, first, 0x7FFFFFFF), axis=0)
            put(greedy_token, row, slot, vocab_size, ints, num_slots, counts, out, full)
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
                has_candidates = (values >= candidates_from) & (values > float("-inf"))
                ones = has_candidates.to(tl.int32)
                place = row * end + tl.cumsum(ones, axis=0) - 1
                tl.store(chosen + place, index, mask=has_candidates)
                tl.store(num_chosen + row, tl.sum(ones, axis=0))
            else:
                number = draw_number(slot, row, num_tokens, ints, num_slots)
                token = pick_by_id(
                    number, sums, chunks, top, 0.0, chunk,
                    logits + row * logits_stride, vocab_size, slot, floats, ints, num_slots, counts,
                    in_prompt, greedy_below, full,
                )  # fmt: skip
                put(token, row, slot, vocab_size, ints, num_slots, counts, out, full)
    if full:
        tl.store(pending + row, is_pending)


@jit
def pick_by_id(
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
def _nth_largest(values: tensor, n: tensor) -> tensor:
    """Return the n-th largest value, by bisection; both ends are always keys of values."""
    keys = ordered(values)
    low = tl.min(keys, axis=0)
    high = tl.max(keys, axis=0)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if tl.sum((keys >= middle).to(tl.int32), axis=0) >= n:
            low = tl.min(tl.where(keys >= middle, keys, high), axis=0)
        else:
            high = tl.max(tl.where(keys < middle, keys, low), axis=0)
    return tl.max(tl.where(keys == low, values, float("-inf")), axis=0)
