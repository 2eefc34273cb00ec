"""Rows with a flat distribution, of which the candidates do not suffice."""

from __future__ import annotations

from aquifer.kernels._triton import (
    constexpr,
    jit,
    jit_once,
    tensor,
    tl,
)
from aquifer.kernels.sampling.pick import pick_by_id
from aquifer.kernels.sampling.scores import cuts, draw_number, load_scores, ordered, put
from aquifer.kernels.sampling.search import append, draw, id_of, scan, search, weigh


@jit_once(indices=("slots", "num_tokens"))
def bracket_kernel(
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
    """Step 5 of `sample`."""
    largest: constexpr = 0x7FFFFFFFFFFFFFFF
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        k, p, m = cuts(slot, vocab_size, floats, ints, num_slots)
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
            keys, masses = weigh(scores, ids, top, m, False, unit)
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
                head_from = ordered(tl.load(threshold + row)) << 31
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
def collect_kernel(
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
    """Step 6 of `sample`."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        k, p, m = cuts(slot, vocab_size, floats, ints, num_slots)
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
            keys, masses = weigh(scores, ids, top, m, False, unit)
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
            append(
                (keys >= cut_from) & (keys < cut_to), scores, ids, lengths + 2 * row,
                list_scores, list_ids, capacity,
            )  # fmt: skip
            append(
                (keys >= draw_from) & (keys < draw_to), scores, ids, lengths + 2 * row + 1,
                list_scores + capacity, list_ids + capacity, capacity,
            )  # fmt: skip


@jit_once(indices=("slots", "num_tokens"))
def finish_kernel(
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
    """Step 7 of `sample`."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) != 0:
        slot = tl.load(slots + row)
        top = tl.load(row_best + row)
        k, p, m = cuts(slot, vocab_size, floats, ints, num_slots)
        number = draw_number(slot, row, num_tokens, ints, num_slots)
        logits += row * logits_stride
        token = tl.cast(0, tl.int64)
        if (k == 0) & (p >= 1):
            chunks = tl.arange(0, chunks_pow2)
            by_chunk = tl.load(
                mass + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0
            )
            place = pick_by_id(
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
                key = draw(
                    number, k, p, (k == 0) & (m == 0), whole, vocab_size, top, m, False,
                    list_scores, list_ids,
                    logits, vocab_size, slot, floats, ints, num_slots, counts,
                    in_prompt, greedy_below, block, unit, False,
                )  # fmt: skip
            token = id_of(key)
        put(token, row, slot, vocab_size, ints, num_slots, counts, out, True)


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
        key = search(
            goal, nothing, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, True,
        )  # fmt: skip
        inside, _, _ = scan(
            key, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        kept = mass_above + inside.to(tl.float64)
    if p < 1:
        goal = p * kept - mass_above
        key = search(
            goal, nothing, length, top, m, False, list_scores, list_ids,
            logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
            block, unit, True, False,
        )  # fmt: skip
        inside, _, _ = scan(
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
    key = search(
        goal, nothing, length, top, m, False, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, True, False,
    )  # fmt: skip
    inside, _, _ = scan(
        key, length, top, m, False, list_scores, list_ids,
        logits, vocab_size, slot, floats, ints, num_slots, counts, in_prompt, greedy_below,
        block, unit, True, False,
    )  # fmt: skip
    is_found = is_found & (count <= capacity) & (goal > 0) & (goal <= inside)
    return key, is_found
