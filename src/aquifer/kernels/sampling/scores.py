"""Scores of tokens, and what all kernels of sampling share."""

from __future__ import annotations

from aquifer.kernels._triton import (
    constexpr,
    jit,
    tensor,
    tl,
)


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
def cuts(
    slot: tensor, vocab_size: tensor, floats: tensor, ints: tensor, num_slots: tensor
) -> tensor:
    """Return (top-k, or 0 if it keeps all tokens; top-p in float64; min-p)."""
    k = tl.load(ints + slot)
    p = tl.load(floats + num_slots + slot).to(tl.float64)
    m = tl.load(floats + 2 * num_slots + slot)
    return tl.where(k < vocab_size, k, 0), p, m


@jit
def first_above(running: tensor, weights: tensor, index: tensor, goal: tensor) -> tensor:
    """Index where the running sum passes the goal; at most the last with a positive weight."""
    place = tl.sum((running <= goal).to(tl.int32), axis=0)
    return tl.minimum(place, tl.max(tl.where(weights > 0, index, 0), axis=0))


@jit
def put(
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
    """Return the number in [0, 1) of `aquifer.kernels.sampling.philox.uniform`."""
    counter = tl.load(num_tokens + row)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (counter * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(tl.load(ints + num_slots + slot), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@jit
def ordered(scores: tensor) -> tensor:
    """Map scores to int64 in [0, 2^32), preserving their order."""
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 0x80000000, -1 - bits)
