"""Rows with min-p, top-k or top-p: a search among the candidates."""

from __future__ import annotations

from aquifer.kernels._triton import (
    constexpr,
    jit,
    jit_once,
    tensor,
    tl,
)
from aquifer.kernels.sampling.scores import cuts, draw_number, load_scores, ordered, put


@jit_once(indices=("slots",))
def gather_kernel(
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
    """Step 3 of `sample`."""
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
            # Without those that are forbidden, or beyond the vocabulary.
            is_candidate = (scores >= tl.load(threshold + row)) & (scores > float("-inf"))
            append(
                is_candidate, scores, ids, lengths + 2 * row,
                list_scores + 2 * row * capacity, list_ids + 2 * row * capacity, limit,
            )  # fmt: skip


@jit
def append(
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
def settle_kernel(
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
    """Step 4 of `sample`."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        top = tl.load(row_best + row)
        count = tl.load(lengths + 2 * row)
        k, p, m = cuts(slot, vocab_size, floats, ints, num_slots)
        # Without min-p and top-k, top-p is a fraction of the whole row's mass.
        of_all = (k == 0) & (m == 0)
        whole = tl.load(row_mass + row) * unit
        # With min-p alone, a token is drawn in the order of ids, as without any cut.
        by_id = (k == 0) & (p >= 1)

        logits += row * logits_stride
        list_scores += 2 * row * capacity
        list_ids += 2 * row * capacity
        length = tl.minimum(count, limit)
        head, _, _ = scan(
            tl.cast(0, tl.int64), length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        # Whether the candidates include all tokens of min-p, or of top-k, or enough for top-p; or
        # all that are not forbidden.
        least = tl.load(threshold + row)
        is_enough = (tl.exp(least - top) < m) | ((k > 0) & (k <= count)) | (least == float("-inf"))
        is_enough = (is_enough | (of_all & (head.to(tl.float64) >= p * whole))) & (count <= limit)
        if is_enough:
            key = draw(
                draw_number(slot, row, num_tokens, ints, num_slots), k, p, of_all, whole,
                length, top, m, by_id, list_scores, list_ids,
                logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
                block, unit, True,
            )  # fmt: skip
            put(id_of(key), row, slot, vocab_size, ints, num_slots, counts, out, True)
            tl.store(pending + row, 0)
        else:
            tl.store(row_head + row, head)


@jit
def draw(
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
        floor = search(
            k.to(tl.float64), floor, length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, from_list, True,
        )  # fmt: skip
    if p < 1:
        left = whole
        if not of_all:
            sums, _, _ = scan(
                floor, length, top, m, by_id, list_scores, list_ids,
                logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
                block, unit, from_list, False,
            )  # fmt: skip
            left = sums.to(tl.float64)
        floor = search(
            p * left, floor, length, top, m, by_id, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, from_list, False,
        )  # fmt: skip
    kept, _, _ = scan(
        floor, length, top, m, by_id, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, from_list, False,
    )  # fmt: skip
    return search(
        tl.maximum(number * kept.to(tl.float64), 1.0), floor,
        length, top, m, by_id, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, from_list, False,
    )  # fmt: skip


@jit
def search(
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
        total, above, below = scan(
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
def scan(
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
        keys, masses = weigh(scores, ids, top, m, by_id, unit)
        is_above = keys >= middle
        if counting:
            sums += tl.where(is_above, 1, 0)
        else:
            sums += tl.where(is_above, masses, 0)
        above = tl.minimum(above, tl.where(is_above, keys, largest))
        below = tl.maximum(below, tl.where(is_above, -1, keys))
    return tl.sum(sums, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@jit
def weigh(
    scores: tensor, ids: tensor, top: tensor, m: tensor, by_id: tensor, unit: constexpr
) -> tensor:
    """Return (keys, -1 for tokens excluded by min-p; masses, exp(score - top) in whole units)."""
    weights = tl.exp(scores - top)
    allowed = (weights > 0) & (weights >= m)
    keys = (tl.where(by_id, 0, ordered(scores)) << 31) | (0x7FFFFFFF - ids).to(tl.int64)
    masses = tl.where(allowed, weights, 0.0) * unit
    return tl.where(allowed, keys, -1), masses.to(tl.int64)


@jit
def id_of(key: tensor) -> tensor:
    """Return the token id of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)
