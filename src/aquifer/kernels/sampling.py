"""Sampling on the device: from logits to token ids, without a word to the CPU.

The steps, their order and the random numbers are those of `engine/sampler.py`: penalties,
temperature, min-p, top-k, top-p, then the inverse of the cumulative distribution at one Philox
number. No vocabulary is sorted:

1. `_chunk_kernel`: one program for each 4096 tokens of a row: their largest score, their sum of
   exp(score), and the largest score of each group of 128.
2. `_pick_kernel`: one program a row. Greedy rows and rows of plain temperature end here: the chunk
   where the running sum passes the number is read again. For a row that is cut (min-p, top-k,
   top-p), it finds a threshold: the r-th largest of the groups' largest scores, so that at least r
   tokens reach it, and seldom many more.
3. `_gather_kernel`: collects the tokens that reach the threshold, the candidates.
4. `_cut_kernel`: one program a row. Each cut, and the draw itself, is the question where a sum
   (of ones or of probabilities) over tokens in falling order passes a goal. It is answered by
   bisection over keys that order all tokens strictly: by score, ties by token id. The candidates
   are searched if they are enough to know, else all of the row: the same answer, more slowly.

A batch runs as one of three variants, of which each can do what those before it can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from aquifer.kernels._triton import constexpr, jit, runs_triton, tensor, tl

Variant = Literal["greedy", "plain", "full"]
"""What a batch needs: "plain" if any temperature is not 0, "full" if any row has a penalty, min-p,
top-k or top-p. Chosen on the host, by what is in the batch."""

GREEDY_BELOW = 1e-5  # a temperature so low that dividing by it would overflow

_GROUP = 128  # tokens whose largest score is kept
_GROUPS = 32  # of a chunk
_CHUNK = _GROUP * _GROUPS
_RANK = 256  # at least that many candidates
_CAPACITY = 4096  # at most that many
_CANDIDATES_BLOCK = 1024  # searched at once
_IN_PROMPT = 1 << 30  # the bit of a count that marks a token of the prompt
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What sampling knows of each sequence, on the device, indexed by slot."""

    temperature: torch.Tensor  # [slots] float32
    top_k: torch.Tensor  # [slots] int64, 0 is all
    top_p: torch.Tensor  # [slots] float32
    min_p: torch.Tensor  # [slots] float32
    seed: torch.Tensor  # [slots] int64, the bits of a uint64
    num_tokens: torch.Tensor  # [slots] int64, known tokens: the position of the one to be drawn
    penalties: torch.Tensor  # [slots, 3] float32: repetition (1 is none), presence, frequency
    counts_row: torch.Tensor  # [slots] int64, row of `counts`, -1 for a slot without penalties
    counts: torch.Tensor  # [rows, vocab] int32, see `write_counts`; rows only for whom needs them

    @classmethod
    def empty(
        cls, num_slots: int, num_counts: int, vocab_size: int, device: torch.device
    ) -> SamplingColumns:
        """Columns of greedy sequences without penalties."""

        def column(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

        penalties = column(0.0, torch.float32, 3)
        penalties[:, 0] = 1.0
        return cls(
            temperature=column(0.0, torch.float32),
            top_k=column(0, torch.int64),
            top_p=column(1.0, torch.float32),
            min_p=column(0.0, torch.float32),
            seed=column(0, torch.int64),
            num_tokens=column(0, torch.int64),
            penalties=penalties,
            counts_row=column(-1, torch.int64),
            counts=torch.zeros(num_counts, vocab_size, dtype=torch.int32, device=device),
        )


def write_counts(counts: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor) -> None:
    """Start the counts of a sequence that has penalties; sampling keeps them from then on.

    Args:
        counts: [vocab] int32, a row of `SamplingColumns.counts`, overwritten.
        prompt: [n] int64, its prompt.
        output: [m] int64, what it has generated before, if it was preempted.
    """
    counts.zero_()
    counts[prompt] = _IN_PROMPT
    counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def sample_reference(
    logits: torch.Tensor, slots: torch.Tensor, columns: SamplingColumns, out: torch.Tensor
) -> None:
    """`sample` in plain torch, in float64, one row after the other."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        scores = logits[row].float()
        counts_row = int(columns.counts_row[slot])
        if counts_row >= 0:
            repetition, presence, frequency = columns.penalties[slot]
            counts = columns.counts[counts_row]
            changed = torch.where(scores > 0, scores / repetition, scores * repetition)
            scores = torch.where(counts != 0, changed, scores)
            output = counts % _IN_PROMPT
            scores = torch.where(output > 0, scores - (presence + frequency * output), scores)
        temperature = float(columns.temperature[slot])
        if temperature < GREEDY_BELOW:
            token = int(scores.argmax())
        else:
            token = _draw_reference(scores / temperature, slot, columns)
        out[row] = token
        if counts_row >= 0:
            columns.counts[counts_row, token] += 1


def _draw_reference(scores: torch.Tensor, slot: int, columns: SamplingColumns) -> int:
    """One row, [vocab]: sorted if it is cut by top-k or top-p."""
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
    number = _uniform_reference(int(columns.seed[slot]), int(columns.num_tokens[slot]))
    column = min(int((sums <= number * sums[-1]).sum()), int(weights.nonzero()[-1]))
    return int(ids[column])


def _uniform_reference(seed: int, counter: int) -> float:
    """One number in [0, 1): Philox4x32-10 of that counter under that key (see engine/random.py)."""
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
    columns: SamplingColumns,
    out: torch.Tensor,
    *,
    variant: Variant = "full",
) -> None:
    """Choose a token for each row, and count it where penalties need to know.

    Args:
        logits: [B, vocab], rows may lie further apart; left as they are.
        slots: [B] int64, the slot of each row; below 0 for a row of padding, whose output stays
            as it was. No slot twice.
        columns: the parameters.
        out: [B] int64, overwritten.
        variant: see `Variant`; it decides which kernels run.
    """
    batch, vocab_size = logits.shape
    assert slots.shape == out.shape == (batch,)
    assert columns.counts.shape[1] == vocab_size
    assert logits.stride(1) == 1
    if not runs_triton(logits):
        sample_reference(logits, slots, columns, out)
        return
    if batch == 0:
        return
    num_chunks = -(-vocab_size // _CHUNK)
    greedy, full = variant == "greedy", variant == "full"

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=logits.device)

    best = scratch(num_chunks, dtype=torch.float32)
    best_id = scratch(num_chunks, dtype=torch.int32)
    mass = scratch(num_chunks if not greedy else 0, dtype=torch.float64)
    groups = scratch(num_chunks * _GROUPS if full else 0, dtype=torch.float32)
    threshold = scratch(dtype=torch.float32)
    row_best = scratch(dtype=torch.float32)
    row_mass = scratch(dtype=torch.float64)
    num_candidates = scratch(dtype=torch.int32)
    source = (logits, logits.stride(0), vocab_size, slots, columns.temperature)
    penalties = (columns.penalties, columns.counts_row, columns.counts)
    draw = (columns.top_k, columns.top_p, columns.min_p, columns.seed, columns.num_tokens)
    _chunk_kernel[(batch, num_chunks)](
        *source, *penalties, best, best_id, mass, groups,
        num_groups=_GROUPS, group=_GROUP, in_prompt=_IN_PROMPT, greedy_below=GREEDY_BELOW,
        greedy=greedy, full=full, num_warps=4,
    )  # fmt: skip
    _pick_kernel[(batch,)](
        *source, *penalties, *draw, best, best_id, mass, groups,
        threshold, row_best, row_mass, num_candidates, out, num_chunks,
        chunks_pow2=_pow2(num_chunks), chunk=_CHUNK, groups_pow2=_pow2(num_chunks * _GROUPS),
        chunk_groups=_GROUPS, rank=_RANK, in_prompt=_IN_PROMPT, greedy_below=GREEDY_BELOW,
        greedy=greedy, full=full, num_warps=8,
    )  # fmt: skip
    if not full:
        return
    scores = scratch(_CAPACITY, dtype=torch.float32)
    ids = scratch(_CAPACITY, dtype=torch.int32)
    _gather_kernel[(batch, num_chunks)](
        *source, *penalties, best, threshold, num_candidates, scores, ids,
        chunk=_CHUNK, capacity=_CAPACITY, in_prompt=_IN_PROMPT, greedy_below=GREEDY_BELOW,
        num_warps=4,
    )  # fmt: skip
    _cut_kernel[(batch,)](
        *source, *penalties, *draw, threshold, row_best, row_mass, num_candidates, scores, ids, out,
        capacity=_CAPACITY, candidates_block=_CANDIDATES_BLOCK, row_block=_CHUNK,
        in_prompt=_IN_PROMPT, greedy_below=GREEDY_BELOW, num_warps=16,
    )  # fmt: skip


def _pow2(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


@jit
def _chunk_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
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
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        # [num_groups, group]
        ids = (chunk * num_groups + tl.arange(0, num_groups)[:, None]) * group
        ids += tl.arange(0, group)[None, :]
        scores = _load_scores(
            logits + row * logits_stride, ids, vocab_size, slot,
            temperature, penalties, counts_row, counts, in_prompt, greedy_below, greedy, full,
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
def _load_scores(
    logits: tensor,
    ids: tensor,
    vocab_size: tensor,
    slot: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    greedy: constexpr,
    full: constexpr,
) -> tensor:
    """Penalised logits of one row over its temperature, at `ids`; -inf behind the vocabulary."""
    inside = ids < vocab_size
    scores = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if full:
        counted = tl.load(counts_row + slot)
        if counted >= 0:
            repetition = tl.load(penalties + slot * 3)
            presence = tl.load(penalties + slot * 3 + 1)
            frequency = tl.load(penalties + slot * 3 + 2)
            known = tl.load(counts + counted * vocab_size + ids, mask=inside, other=0)
            changed = tl.where(scores > 0, scores / repetition, scores * repetition)
            scores = tl.where(known != 0, changed, scores)
            times = known % in_prompt
            scores = tl.where(times > 0, scores - (presence + frequency * times), scores)
    if not greedy:
        divisor = tl.load(temperature + slot)
        scores = scores * (1.0 / tl.where(divisor < greedy_below, 1.0, divisor))
    return scores


@jit
def _pick_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    top_k: tensor,
    top_p: tensor,
    min_p: tensor,
    seed: tensor,
    num_tokens: tensor,
    best: tensor,
    best_id: tensor,
    mass: tensor,
    groups: tensor,
    threshold: tensor,
    row_best: tensor,
    row_mass: tensor,
    num_candidates: tensor,
    out: tensor,
    num_chunks: tensor,
    chunks_pow2: constexpr,
    chunk: constexpr,
    groups_pow2: constexpr,
    chunk_groups: constexpr,
    rank: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
    greedy: constexpr,
    full: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    candidates_from = float("inf")  # no candidates
    if slot >= 0:
        chunks = tl.arange(0, chunks_pow2)
        inside = chunks < num_chunks
        maxima = tl.load(best + row * num_chunks + chunks, mask=inside, other=float("-inf"))
        top = tl.max(maxima, axis=0)
        is_greedy = True
        if not greedy:
            is_greedy = tl.load(temperature + slot) < greedy_below
        is_cut = False
        if full:
            k = tl.load(top_k + slot)
            is_cut = ((k > 0) & (k < vocab_size)) | (tl.load(top_p + slot) < 1)
            is_cut = is_cut | (tl.load(min_p + slot) > 0)
        if is_greedy:
            first = tl.load(best_id + row * num_chunks + chunks, mask=inside, other=0x7FFFFFFF)
            greedy_token = tl.min(tl.where(maxima == top, first, 0x7FFFFFFF), axis=0)
            _put(greedy_token, row, slot, vocab_size, counts_row, counts, out, full)
        elif not greedy:
            sums = tl.load(mass + row * num_chunks + chunks, mask=inside, other=0.0)
            sums *= tl.exp(maxima - top).to(tl.float64)
            if is_cut:
                tl.store(row_best + row, top)
                tl.store(row_mass + row, tl.sum(sums, axis=0))
                tl.store(num_candidates + row, 0)
                index = tl.arange(0, groups_pow2)
                num_groups = num_chunks * chunk_groups
                values = tl.load(
                    groups + row * num_groups + index, mask=index < num_groups, other=float("-inf")
                )
                wanted = tl.minimum(tl.maximum(tl.load(top_k + slot), rank), num_groups)
                candidates_from = _nth_largest(values, wanted)
            else:
                # The chunk, then the token in it, where the running sum passes the number.
                running = tl.cumsum(sums, axis=0)
                goal = _uniform(seed, num_tokens, slot) * tl.sum(sums, axis=0)
                chosen = _first_above(running, sums, chunks, goal)
                goal -= tl.sum(tl.where(chunks < chosen, sums, 0.0), axis=0)
                offsets = tl.arange(0, chunk)
                scores = _load_scores(
                    logits + row * logits_stride, chosen * chunk + offsets, vocab_size, slot,
                    temperature, penalties, counts_row, counts, in_prompt, greedy_below,
                    False, full,
                )  # fmt: skip
                weights = tl.exp(scores - top).to(tl.float64)
                place = _first_above(tl.cumsum(weights, axis=0), weights, offsets, goal)
                token = chosen * chunk + place
                _put(token, row, slot, vocab_size, counts_row, counts, out, full)
    if full:
        tl.store(threshold + row, candidates_from)


@jit
def _put(
    token: tensor,
    row: tensor,
    slot: tensor,
    vocab_size: tensor,
    counts_row: tensor,
    counts: tensor,
    out: tensor,
    full: constexpr,
) -> None:
    """Give out a token, which is in the vocabulary even if all logits were NaN, and count it."""
    valid = tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int64)
    tl.store(out + row, valid)
    if full:
        counted = tl.load(counts_row + slot)
        if counted >= 0:
            place = counts + counted * vocab_size + valid
            tl.store(place, tl.load(place) + 1)


@jit
def _first_above(running: tensor, weights: tensor, index: tensor, goal: tensor) -> tensor:
    """The place where the running sum passes the goal; at most the last with any weight."""
    place = tl.sum((running <= goal).to(tl.int32), axis=0)
    return tl.minimum(place, tl.max(tl.where(weights > 0, index, 0), axis=0))


@jit
def _uniform(seed: tensor, num_tokens: tensor, slot: tensor) -> tensor:
    """The number in [0, 1) of engine/random.py: 53 bits of Philox under the seed."""
    counter = tl.load(num_tokens + slot)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (counter * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(tl.load(seed + slot), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@jit
def _ordered(scores: tensor) -> tensor:
    """int64 in [0, 2^32) in the order of the scores."""
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 0x80000000, -1 - bits)


@jit
def _nth_largest(values: tensor, n: tensor) -> tensor:
    """By bisection; both ends are always the keys of values, and the answer is between them."""
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


@jit
def _gather_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    best: tensor,
    threshold: tensor,
    num_candidates: tensor,
    candidate_scores: tensor,
    candidate_ids: tensor,
    chunk: constexpr,
    capacity: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    candidates_from = tl.load(threshold + row)
    chunk_best = tl.load(best + row * tl.num_programs(1) + number)
    if (candidates_from < float("inf")) & (chunk_best >= candidates_from):
        slot = tl.load(slots + row)
        ids = number * chunk + tl.arange(0, chunk)
        scores = _load_scores(
            logits + row * logits_stride, ids, vocab_size, slot,
            temperature, penalties, counts_row, counts, in_prompt, greedy_below, False, True,
        )  # fmt: skip
        is_candidate = (scores >= candidates_from) & (ids < vocab_size)
        ones = is_candidate.to(tl.int32)
        # In which order the chunks come does not matter: sums are in float64, and keys are unique.
        first = tl.atomic_add(num_candidates + row, tl.sum(ones, axis=0))
        place = first + tl.cumsum(ones, axis=0) - 1
        kept = is_candidate & (place < capacity)
        tl.store(candidate_scores + row * capacity + place, scores, mask=kept)
        tl.store(candidate_ids + row * capacity + place, ids, mask=kept)


@jit
def _cut_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_size: tensor,
    slots: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    top_k: tensor,
    top_p: tensor,
    min_p: tensor,
    seed: tensor,
    num_tokens: tensor,
    threshold: tensor,
    row_best: tensor,
    row_mass: tensor,
    num_candidates: tensor,
    candidate_scores: tensor,
    candidate_ids: tensor,
    out: tensor,
    capacity: constexpr,
    candidates_block: constexpr,
    row_block: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    candidates_from = tl.load(threshold + row)
    if candidates_from < float("inf"):
        slot = tl.load(slots + row)
        top = tl.load(row_best + row)
        total = tl.load(row_mass + row)
        count = tl.load(num_candidates + row)
        k = tl.load(top_k + slot)
        k = tl.where(k < vocab_size, k, 0)
        p = tl.load(top_p + slot).to(tl.float64)
        m = tl.load(min_p + slot)
        number = _uniform(seed, num_tokens, slot)
        # Without min-p and top-k, top-p is a fraction of all there is.
        of_all = (k == 0) & (m == 0)
        # Cut by min-p alone, a row is drawn from in the order of token ids, as if it were whole.
        by_id = (k == 0) & (p >= 1)

        logits += row * logits_stride
        candidate_scores += row * capacity
        candidate_ids += row * capacity
        length = tl.minimum(count, capacity)
        kept, _, _ = _scan(
            tl.cast(0, tl.int64), length, top, m, by_id, candidate_scores, candidate_ids,
            logits, vocab_size, slot, temperature, penalties, counts_row, counts,
            in_prompt, greedy_below, candidates_block, True, False,
        )  # fmt: skip
        # Whether the candidates are all that min-p leaves, or all of top-k, or enough for top-p.
        is_enough = (tl.exp(candidates_from - top) < m) | ((k > 0) & (k <= count))
        is_enough = (is_enough | (of_all & (kept >= p * total))) & (count <= capacity)
        if is_enough:
            token = _draw(
                number, k, p, of_all, total, length, top, m, by_id,
                candidate_scores, candidate_ids,
                logits, vocab_size, slot, temperature, penalties, counts_row, counts,
                in_prompt, greedy_below, candidates_block, True,
            )  # fmt: skip
        else:
            token = _draw(
                number, k, p, of_all, total, vocab_size, top, m, by_id,
                candidate_scores, candidate_ids,
                logits, vocab_size, slot, temperature, penalties, counts_row, counts,
                in_prompt, greedy_below, row_block, False,
            )  # fmt: skip
        _put(token, row, slot, vocab_size, counts_row, counts, out, True)


@jit
def _draw(
    number: tensor,
    k: tensor,
    p: tensor,
    of_all: tensor,
    total: tensor,
    length: tensor,
    top: tensor,
    m: tensor,
    by_id: tensor,
    candidate_scores: tensor,
    candidate_ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    from_candidates: constexpr,
) -> tensor:
    """A token id, out of the `length` candidates or out of all the row."""
    floor = tl.cast(0, tl.int64)  # the smallest key that is left by top-k, then by top-p
    if k > 0:
        floor = _search(
            k.to(tl.float64), floor, length, top, m, by_id, candidate_scores, candidate_ids,
            logits, vocab_size, slot, temperature, penalties, counts_row, counts,
            in_prompt, greedy_below, block, from_candidates, True,
        )  # fmt: skip
    if p < 1:
        whole = total
        if not of_all:
            whole, _, _ = _scan(
                floor, length, top, m, by_id, candidate_scores, candidate_ids,
                logits, vocab_size, slot, temperature, penalties, counts_row, counts,
                in_prompt, greedy_below, block, from_candidates, False,
            )  # fmt: skip
        floor = _search(
            p * whole, floor, length, top, m, by_id, candidate_scores, candidate_ids,
            logits, vocab_size, slot, temperature, penalties, counts_row, counts,
            in_prompt, greedy_below, block, from_candidates, False,
        )  # fmt: skip
    kept, _, _ = _scan(
        floor, length, top, m, by_id, candidate_scores, candidate_ids,
        logits, vocab_size, slot, temperature, penalties, counts_row, counts,
        in_prompt, greedy_below, block, from_candidates, False,
    )  # fmt: skip
    key = _search(
        number * kept, floor, length, top, m, by_id, candidate_scores, candidate_ids,
        logits, vocab_size, slot, temperature, penalties, counts_row, counts,
        in_prompt, greedy_below, block, from_candidates, False,
    )  # fmt: skip
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@jit
def _search(
    goal: tensor,
    low: tensor,
    length: tensor,
    top: tensor,
    m: tensor,
    by_id: tensor,
    candidate_scores: tensor,
    candidate_ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    from_candidates: constexpr,
    counting: constexpr,
) -> tensor:
    """The largest key from which on upwards tokens (or their weights) sum up to the goal.

    It is in [low, high]; both ends jump to the nearest key that there is. If everything from `low`
    on is too little, `low`.
    """
    high = tl.cast(0x7FFFFFFFFFFFFFFF, tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        total, above, below = _scan(
            middle, length, top, m, by_id, candidate_scores, candidate_ids,
            logits, vocab_size, slot, temperature, penalties, counts_row, counts,
            in_prompt, greedy_below, block, from_candidates, counting,
        )  # fmt: skip
        if total >= goal:
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
    candidate_scores: tensor,
    candidate_ids: tensor,
    logits: tensor,
    vocab_size: tensor,
    slot: tensor,
    temperature: tensor,
    penalties: tensor,
    counts_row: tensor,
    counts: tensor,
    in_prompt: constexpr,
    greedy_below: constexpr,
    block: constexpr,
    from_candidates: constexpr,
    counting: constexpr,
) -> tensor:
    """(how much has a key of at least `middle`, the lowest key of that, the highest below it)."""
    largest: constexpr = 0x7FFFFFFFFFFFFFFF
    sums = tl.zeros([block], tl.float64)
    above = tl.full([block], largest, tl.int64)
    below = tl.full([block], -1, tl.int64)
    for start in range(0, length, block):
        place = start + tl.arange(0, block)
        if from_candidates:
            ids = tl.load(candidate_ids + place, mask=place < length, other=0)
            scores = tl.load(candidate_scores + place, mask=place < length, other=float("-inf"))
        else:
            ids = place
            scores = _load_scores(
                logits, place, vocab_size, slot,
                temperature, penalties, counts_row, counts, in_prompt, greedy_below, False, True,
            )  # fmt: skip
        weights = tl.exp(scores - top)
        keys = (tl.where(by_id, 0, _ordered(scores)) << 31) | (0x7FFFFFFF - ids).to(tl.int64)
        keys = tl.where((weights > 0) & (weights >= m), keys, -1)
        is_above = keys >= middle
        if counting:
            sums += tl.where(is_above, 1.0, 0.0)
        else:
            sums += tl.where(is_above, weights, 0.0)
        above = tl.minimum(above, tl.where(is_above, keys, largest))
        below = tl.maximum(below, tl.where(is_above, -1, keys))
    return tl.sum(sums, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)
