"""Sampling where each rank has some columns of the logits: greedy, or by a temperature alone.

Logits of all tokens are large (33 MB of 256 sequences and half of Llama 3's vocabulary), so they
stay where they are, and ranks exchange what the choice depends on:

1. `summarise`: a rank writes of each 4096 columns the largest score, its token, and the sum of
   exp(score), into its own part of a table that is zero elsewhere.
2. The caller adds up the tables of all ranks, and so joins them.
3. `choose`: greedy rows have their token in the table. For the others, every rank finds the chunk
   in which the running sum passes the row's number, as `pick.py` does. The rank
   that has the chunk looks up the token, and all others write 0.
4. The caller adds up what all ranks have written.

All ranks compute from the same table, so they agree on each token without being told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit_once,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.sampling.columns import GREEDY_BELOW, IN_PROMPT, SamplingColumns
from aquifer.kernels.sampling.reference import number_reference
from aquifer.kernels.sampling.sample import CHUNK
from aquifer.kernels.sampling.scores import draw_number, first_above, load_scores

_NO_TOKEN = 1 << 24
"""More than any token; float32, as the table has them, counts exactly up to here."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The columns of one rank: tokens from `rank * num_columns` on; the last ranks have padding.

    Attributes:
        rank: number of the rank.
        size: number of ranks.
        num_columns: columns of each rank's logits.
        vocab_size: tokens of all ranks, at most 2^24.
    """

    rank: int
    size: int
    num_columns: int
    vocab_size: int

    @property
    def first_token(self) -> int:
        """Token of the first column."""
        return self.rank * self.num_columns

    @property
    def num_tokens(self) -> int:
        """Columns that are no padding."""
        return min(max(self.vocab_size - self.first_token, 0), self.num_columns)

    @property
    def num_chunks(self) -> int:
        """Entries of a rank in a row of the table."""
        return -(-self.num_columns // CHUNK)

    def table(self, num_rows: int, device: torch.device, *, is_greedy: bool) -> torch.Tensor:
        """A table for `summarise`: [rows, size * num_chunks, 2 or 4] float32, zero.

        An entry has the largest score and its token; then, unless all rows are greedy, the sum of
        exp(score - largest), as a float32 and what that lacks.
        """
        entries = self.size * self.num_chunks
        return torch.zeros(num_rows, entries, 2 if is_greedy else 4, device=device)


def summarise_reference(
    logits: torch.Tensor,
    part: VocabularyPart,
    slots: torch.Tensor,
    columns: SamplingColumns,
    table: torch.Tensor,
) -> None:
    """`summarise` in plain torch."""
    rows = (slots >= 0).nonzero().flatten()
    scores = logits[rows].new_full(
        (len(rows), part.num_chunks * CHUNK), -torch.inf, dtype=torch.float32
    )
    scores[:, : part.num_tokens] = logits[rows, : part.num_tokens].float()
    if table.shape[2] > 2:
        divisors = columns.temperature[slots[rows]]
        scores /= torch.where(divisors < GREEDY_BELOW, 1.0, divisors).unsqueeze(1)
    chunks = scores.view(len(rows), part.num_chunks, CHUNK)
    best, places = chunks.max(2).values, chunks.argmax(2)
    tokens = part.first_token + CHUNK * torch.arange(part.num_chunks, device=places.device) + places
    own = table[:, part.rank * part.num_chunks :][:, : part.num_chunks]
    own[rows, :, 0] = best
    own[rows, :, 1] = tokens.float()
    if table.shape[2] > 2:
        shift = torch.where(best == -torch.inf, 0.0, best).unsqueeze(2)
        masses = (chunks - shift).double().exp().sum(2)
        own[rows, :, 2] = masses.float()
        own[rows, :, 3] = (masses - masses.float()).float()


def summarise(
    logits: torch.Tensor,
    part: VocabularyPart,
    slots: torch.Tensor,
    columns: SamplingColumns,
    table: torch.Tensor,
) -> None:
    """Write this rank's entries of the table.

    Args:
        logits: [B, num_columns], this rank's, any row stride; not modified.
        part: which columns.
        slots: [B] int64, the slot of each row; below 0 for padding, which is skipped.
        columns: the sampling parameters; the temperature is all that is read.
        table: `VocabularyPart.table`; with four numbers an entry if a row is not greedy.
    """
    batch = len(slots)
    assert logits.shape == (batch, part.num_columns)
    assert logits.stride(1) == 1
    assert table.shape[:2] == (batch, part.size * part.num_chunks)
    assert part.vocab_size <= _NO_TOKEN
    if not runs_triton(logits):
        summarise_reference(logits, part, slots, columns, table)
        return
    if batch == 0:
        return
    _summarise_kernel[(batch, part.num_chunks)](
        logits, logits.stride(0), part.num_tokens, part.first_token, slots,
        columns.floats, columns.ints, columns.floats.shape[1], table, part.rank * part.num_chunks,
        table.shape[1], width=table.shape[2], chunk=CHUNK, no_token=_NO_TOKEN, in_prompt=IN_PROMPT,
        greedy_below=GREEDY_BELOW, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip


@jit_once(counts=("num_tokens", "first_token", "first_entry"), indices=("slots",))
def _summarise_kernel(
    logits: tensor,
    logits_stride: tensor,
    num_tokens: tensor,
    first_token: tensor,
    slots: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    table: tensor,
    first_entry: tensor,
    num_entries: tensor,
    width: constexpr,
    chunk: constexpr,
    no_token: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
    overlaps: constexpr,
) -> None:
    """One program for each chunk of each row."""
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        greedy: constexpr = width == 2
        columns = number * chunk + tl.arange(0, chunk)
        scores = load_scores(
            columns, logits + row * logits_stride, num_tokens, slot, floats, ints, num_slots, ints,
            in_prompt, greedy_below, greedy, False,
        )  # fmt: skip
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == best, first_token + columns, no_token), axis=0)
        entry = table + (row * num_entries + first_entry + number) * width
        tl.store(entry, best)
        tl.store(entry + 1, token.to(tl.float32))
        if not greedy:
            shift = tl.where(best == float("-inf"), 0.0, best)
            mass = tl.sum(tl.exp(scores - shift).to(tl.float64), axis=0)
            rounded = mass.to(tl.float32)
            tl.store(entry + 2, rounded)
            tl.store(entry + 3, (mass - rounded.to(tl.float64)).to(tl.float32))


def choose_reference(
    logits: torch.Tensor,
    part: VocabularyPart,
    table: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
) -> None:
    """`choose` in plain torch, in float64, row by row."""
    is_greedy = table.shape[2] == 2
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        best, tokens = table[row, :, 0].double(), table[row, :, 1]
        top = best.max()
        divisor = float(columns.temperature[slot])
        if is_greedy or divisor < GREEDY_BELOW:
            equal = tokens[best == top].tolist()
            token = int(min(equal, default=0))
            out[row] = min(token, part.vocab_size - 1) if part.rank == 0 or is_greedy else 0
            continue
        sums = table[row, :, 2:].double().sum(1) * (best - top).exp()
        number = number_reference(int(columns.seed[slot]), int(num_tokens[row]))
        entry, goal = _passed(sums, number * float(sums.sum()))
        own = entry - part.rank * part.num_chunks
        out[row] = 0
        if 0 <= own < part.num_chunks:
            scores = logits[row, : part.num_tokens].float()[own * CHUNK :][:CHUNK] / divisor
            place, _ = _passed((scores.double() - top).exp(), goal)
            token = part.first_token + own * CHUNK + place
            out[row] = min(max(token, 0), part.vocab_size - 1)


def _passed(weights: torch.Tensor, goal: float) -> tuple[int, float]:
    """Where the running sum passes the goal, at most at the last weight above 0; and what of the
    goal is left there."""
    place = int((weights.cumsum(0) <= goal).sum())
    positive = (weights > 0).nonzero()
    place = min(place, int(positive[-1]) if len(positive) else 0)
    return place, goal - float(weights[:place].sum())


def choose(
    logits: torch.Tensor,
    part: VocabularyPart,
    table: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    out: torch.Tensor,
) -> None:
    """Choose a token for each row, as far as this rank can.

    Args:
        logits: as for `summarise`.
        part: which columns.
        table: that of all ranks.
        slots: [B] int64, as for `summarise`.
        num_tokens: [B] int64, the known tokens of each row: the position of the one to be drawn.
        columns: the sampling parameters; temperature and seed are read.
        out: [B], overwritten except for padding. With two numbers an entry, it is the token, on
            each rank, and `out` int64. With four, `out` is float32, and what all ranks write adds
            up to the token.
    """
    batch = len(slots)
    is_greedy = table.shape[2] == 2
    assert num_tokens.shape == out.shape == (batch,)
    assert out.dtype == (torch.int64 if is_greedy else torch.float32)
    if not runs_triton(logits):
        choose_reference(logits, part, table, slots, num_tokens, columns, out)
        return
    if batch == 0:
        return
    _choose_kernel[(batch,)](
        logits, logits.stride(0), part.num_tokens, part.first_token, part.vocab_size,
        slots, num_tokens, columns.floats, columns.ints, columns.floats.shape[1],
        table, table.shape[1], part.rank, part.num_chunks, out,
        width=table.shape[2], entries_pow2=pow2(table.shape[1]), chunk=CHUNK, no_token=_NO_TOKEN,
        in_prompt=IN_PROMPT, greedy_below=GREEDY_BELOW,
        num_warps=1 if is_greedy else 8, **launch_options(logits.device),
    )  # fmt: skip


@jit_once(counts=("vocab_part", "first_token", "rank"), indices=("slots", "num_tokens", "out"))
def _choose_kernel(
    logits: tensor,
    logits_stride: tensor,
    vocab_part: tensor,
    first_token: tensor,
    vocab_size: tensor,
    slots: tensor,
    num_tokens: tensor,
    floats: tensor,
    ints: tensor,
    num_slots: tensor,
    table: tensor,
    num_entries: tensor,
    rank: tensor,
    num_chunks: tensor,
    out: tensor,
    width: constexpr,
    entries_pow2: constexpr,
    chunk: constexpr,
    no_token: constexpr,
    in_prompt: constexpr,
    greedy_below: constexpr,
    overlaps: constexpr,
) -> None:
    """One program for each row; `vocab_part` is the number of this rank's tokens."""
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        index = tl.arange(0, entries_pow2)
        inside = index < num_entries
        entries = table + (row * num_entries + index) * width
        best = tl.load(entries, mask=inside, other=float("-inf"))
        top = tl.max(best, axis=0)
        first = tl.load(entries + 1, mask=inside, other=no_token)
        token = tl.min(tl.where(best == top, first, no_token), axis=0).to(tl.int32)
        if width == 4:
            # Every rank has found it, and one writes it.
            token = tl.where(rank == 0, token, 0)
            if tl.load(floats + slot) >= greedy_below:
                sums = tl.load(entries + 2, mask=inside, other=0.0).to(tl.float64)
                sums += tl.load(entries + 3, mask=inside, other=0.0).to(tl.float64)
                sums *= tl.exp(best - top).to(tl.float64)
                goal = draw_number(slot, row, num_tokens, ints, num_slots) * tl.sum(sums, axis=0)
                which = first_above(tl.cumsum(sums, axis=0), sums, index, goal)
                goal -= tl.sum(tl.where(index < which, sums, 0.0), axis=0)
                own = which - rank * num_chunks
                token = 0
                if (own >= 0) & (own < num_chunks):
                    places = tl.arange(0, chunk)
                    scores = load_scores(
                        own * chunk + places, logits + row * logits_stride, vocab_part, slot,
                        floats, ints, num_slots, ints, in_prompt, greedy_below, False, False,
                    )  # fmt: skip
                    weights = tl.exp(scores - top).to(tl.float64)
                    running = tl.cumsum(weights, axis=0)
                    place = first_above(running, weights, places, goal)
                    token = first_token + own * chunk + place
        valid = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
        tl.store(out + row, valid.to(out.dtype.element_ty))
