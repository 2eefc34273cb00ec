"""Rows of mixers that decode, as they do on a GPU, are chunks of one token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aquifer.cache.base import Rows, Spans
from aquifer.cache.group_view import GroupedView
from aquifer.cache.state_view import StateView
from aquifer.models.mixers.base import Mixer
from aquifer.models.mixers.gated_delta import GatedDelta
from aquifer.models.mixers.mamba1 import InnerNorm, Mamba1
from aquifer.models.mixers.mamba2 import Mamba2

HIDDEN = 24
SLOTS = 5
MIXERS: dict[str, Mixer] = {
    "mamba1": Mamba1(20, 6, 4, 5),
    "mamba1-norms": Mamba1(20, 6, 3, 5, inner_norm=InnerNorm.WEIGHTED),
    "mamba2": Mamba2(4, 6, 2, 8, 4, norm_eps=1e-5),
    "gated_delta": GatedDelta(2, 4, 8, 6, 4, norm_eps=1e-5),
}


CPU = torch.device("cpu")


def split_rows(spans: Spans, num_decodes: int, device: torch.device = CPU) -> Rows:
    """The rows of a step of which the first have one token each, as they are on a GPU."""
    arrays = Rows.arrays(spans, num_decodes)
    tensors = [torch.from_numpy(array.copy()).to(device) for array in arrays]
    return Rows.over(spans, num_decodes, tensors)


def with_padding(rows: Rows, count: int) -> Rows:
    """The rows of a captured step, all of which decode, with padding behind them."""
    assert rows.chunks is None
    slots, positions = (
        torch.cat((tensor, tensor.new_full((count,), fill)))
        for tensor, fill in ((rows.slots, -1), (rows.positions, 0))
    )
    lengths = torch.cat((rows.decode_lengths, rows.decode_lengths.new_zeros(count)))
    return replace(rows, slots=slots, positions=positions, decode_lengths=lengths)


class Layer:
    """A mixer with random weights, in the second of two layers with state."""

    def __init__(self, mixer: Mixer, device: torch.device = CPU) -> None:
        generator = torch.Generator().manual_seed(0)
        self._states = [
            [
                torch.rand(SLOTS, *each.shape, generator=generator).to(device)
                for each in mixer.state(torch.float32, torch.float32)
            ]
            for _ in range(2)
        ]
        tensors = {
            parameter.name: (
                torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            ).to(device)
            for parameter in mixer.parameters("own.", "stored.", HIDDEN, torch.float32)
        }
        self._layer = mixer.layer(tensors, "own.", 1)
        self._device = device

    @torch.inference_mode()
    def run(
        self, x: torch.Tensor, rows: Rows, after: torch.Tensor, rows_after: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, list[list[torch.Tensor]]]:
        """Results [rows, hidden] of a step and of one after it, and the states between them, from
        the same states each time; all on the CPU."""
        states = [[each.clone() for each in layer] for layer in self._states]
        product = self._layer.in_proj(x.to(self._device))
        # Of a sequence that begins, nothing is read.
        for slot in rows.slots[(rows.positions == 0) & (rows.slots >= 0)]:
            for each in states[1]:
                each[slot] = torch.nan
        results = self._mix(product, GroupedView([], [], StateView(states, rows)))
        between = [[each.cpu().clone() for each in layer] for layer in states]
        product = self._layer.in_proj(after.to(self._device))
        last = self._mix(product, GroupedView([], [], StateView(states, rows_after)))
        return results.cpu(), last.cpu(), between

    def _mix(self, product: torch.Tensor, kv: GroupedView) -> torch.Tensor:
        return self._layer.out_proj(self._layer.finish(self._layer.recur(product, kv), product))


def check(mixer: Mixer, spans: Spans, rows: Rows) -> None:
    """The results of some rows, on their device, are those of chunks on the CPU.

    So are those of chunks after them, which show the states: of the same state, more or less may be
    pending.
    """
    generator = torch.Generator().manual_seed(1)
    counts = np.full(len(spans.slots), 2)
    next_spans = Spans.make(spans.slots, spans.starts + spans.counts, counts)
    x, after = (
        torch.randn(count, HIDDEN, generator=generator)
        for count in (len(rows.slots), next_spans.num_tokens)
    )
    device = rows.slots.device
    expected, last_expected, states = Layer(mixer).run(
        x[: spans.num_tokens], split_rows(spans, 0), after, split_rows(next_spans, 0)
    )
    own = Layer(mixer, device)
    found, last_found, states_found = own.run(x, rows, after, split_rows(next_spans, 0, device))
    assert found.isfinite().all()
    torch.testing.assert_close(found[: spans.num_tokens], expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(last_found, last_expected, rtol=1e-4, atol=2e-5)
    # Another layer, and slots that have no rows, are as they were.
    others = sorted({*range(SLOTS)} - {*spans.slots.tolist()})
    for ours, theirs in zip(states_found[0], states[0], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(states_found[1], states[1], strict=True):
        assert torch.equal(ours[others], theirs[others])


def make_spans(*spans: tuple[int, int, int]) -> Spans:
    """Spans of (slot, start, count)."""
    slots, starts, counts = np.array(spans).T
    return Spans.make(slots, starts, counts)


@pytest.mark.parametrize("name", MIXERS)
def test_rows_that_decode_beside_chunks(name: str) -> None:
    spans = make_spans((3, 7, 1), (0, 0, 1), (4, 2, 9), (1, 0, 5))
    check(MIXERS[name], spans, split_rows(spans, 2))


@pytest.mark.parametrize("name", MIXERS)
def test_rows_that_decode_beside_padding(name: str) -> None:
    spans = make_spans((3, 7, 1), (0, 0, 1), (1, 30, 1))
    check(MIXERS[name], spans, with_padding(split_rows(spans, 3), 2))
