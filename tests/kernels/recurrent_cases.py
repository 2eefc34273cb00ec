"""Steps of sequences with recurrent state, shared by the tests of its kernels."""

from __future__ import annotations

import torch

from aquifer.kernels.prefill_attention import PrefillSpans

FIRST_ROW = 3
"""Rows before the chunks of `make_spans`, which belong to no chunk."""


def make_spans(
    chunks: list[tuple[int, int]], device: torch.device, *, slots: list[int] | None = None
) -> PrefillSpans:
    """Chunks of (start, count), in slots in no order, with one slot in between that has none."""
    if slots is None:
        slots = [2 * index + 1 for index in reversed(range(len(chunks)))]
    offsets = [FIRST_ROW]
    for _, count in chunks:
        offsets.append(offsets[-1] + count)
    return PrefillSpans.of(slots, [start for start, _ in chunks], offsets, device)


def make_state(
    shape: tuple[int, ...],
    spans: PrefillSpans,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """State [slots, *shape] in the second half of each slot's bytes; NaN where a sequence begins.

    The last two slots have no chunk.
    """
    num_slots = max(spans.slots, default=0) + 3
    whole = torch.randn((num_slots, 2, *shape), generator=generator, device=generator.device)
    state = whole.to(dtype)[:, 1]
    for slot, start in zip(spans.slots, spans.starts, strict=True):
        if start == 0:
            state[slot] = torch.nan
    return state


def copy_of_state(state: torch.Tensor) -> torch.Tensor:
    """A copy of a state, whose slots are as far apart."""
    whole = torch.full(
        (len(state), 2, *state.shape[1:]), torch.nan, dtype=state.dtype, device=state.device
    )
    whole[:, 1] = state
    return whole[:, 1]


def first_state(state: torch.Tensor, slot: int, start: int) -> torch.Tensor:
    """The state of a sequence before a chunk, in float64."""
    return torch.zeros_like(state[slot]).double() if start == 0 else state[slot].double()


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference by the norm of the exact result, which is of float64."""
    assert exact.dtype == torch.float64
    assert result.isfinite().all()
    if not exact.numel():
        return 0.0
    return float((result.double() - exact).norm() / exact.norm())
