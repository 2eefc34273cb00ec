"""The causal convolution and the gated norm against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.recurrent_cases import (
    copy_of_state,
    first_state,
    make_spans,
    make_state,
    relative_error,
)

from aquifer.kernels.causal_conv import (
    conv_chunks,
    conv_chunks_reference,
    conv_update,
    conv_update_reference,
)
from aquifer.kernels.gated_norm import gated_norm, gated_norm_reference

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def exact(x, weight, bias, before, activation) -> tuple[torch.Tensor, torch.Tensor]:
    """(results, state after) of one sequence's tokens, x [tokens, C], before [C, K - 1]."""
    window = torch.cat([before, x.double().T], dim=1)
    taps = weight.shape[1]
    results = []
    for token in range(len(x)):
        total = (window[:, token : token + taps] * weight.double()).sum(1)
        total = total if bias is None else total + bias.double()
        results.append(total if activation is None else F.silu(total))
    return torch.stack(results), window[:, len(x) :]


@pytest.mark.parametrize("operation", [conv_chunks, conv_chunks_reference])
@pytest.mark.parametrize(
    ("channels", "taps", "has_bias", "activation", "dtype"),
    [
        (20, 4, True, "silu", torch.float32),
        (300, 2, False, None, torch.float32),
        (7, 3, True, None, torch.bfloat16),
    ],
)
def test_chunks(device, channels, taps, has_bias, activation, dtype, operation):
    """Chunks shorter than the window, and longer ones, after state and without."""
    generator = torch.Generator(device).manual_seed(0)
    chunks = [(0, 1), (5, 2), (0, 70), (3, 1), (9, 3), (0, 2)]
    spans = make_spans(chunks, device)
    wide = torch.randn(spans.offsets[-1] + 2, channels + 3, generator=generator, device=device)
    x = wide.to(dtype)[:, :channels]
    weight = torch.randn(channels, taps, generator=generator, device=device).to(dtype)
    bias = torch.randn(channels, generator=generator, device=device).to(dtype)
    own_bias = bias if has_bias else None
    state = make_state((channels, taps - 1), spans, generator, dtype)
    after, out = copy_of_state(state), torch.full_like(x, torch.nan)
    operation(x, weight, own_bias, after, spans, out, activation=activation)
    begin, end = spans.offsets[0], spans.offsets[-1]
    assert out[:begin].isnan().all()
    assert out[end:].isnan().all()
    for i, (slot, start) in enumerate(zip(spans.slots, spans.starts, strict=True)):
        rows = slice(spans.offsets[i], spans.offsets[i + 1])
        before = first_state(state, slot, start)
        results, expected = exact(x[rows], weight, own_bias, before, activation)
        assert relative_error(out[rows], results) < 2 * MAX_ERROR[dtype]
        assert torch.equal(after[slot].double(), expected)
    others = [slot for slot in range(len(state)) if slot not in spans.slots]
    assert torch.equal(after[others], state[others])


@pytest.mark.parametrize("operation", [conv_update, conv_update_reference])
@pytest.mark.parametrize(("channels", "taps"), [(20, 4), (300, 2)])
def test_updates(device, channels, taps, operation):
    """Rows of one token each, with padding between them."""
    generator = torch.Generator(device).manual_seed(0)
    spans = make_spans([(4, 1), (0, 1), (9, 1)], device)
    state = make_state((channels, taps - 1), spans, generator)
    x = torch.randn(5, channels + 1, generator=generator, device=device)[:, 1:]
    weight = torch.randn(channels, taps, generator=generator, device=device)
    bias = torch.randn(channels, generator=generator, device=device)
    slots = torch.tensor([spans.slots[0], -1, spans.slots[1], spans.slots[2], -1], device=device)
    positions = torch.tensor([4, 0, 0, 9, 3], device=device)
    after, out = copy_of_state(state), torch.full_like(x, torch.nan)
    operation(x, weight, bias, after, slots, positions, out, activation="silu")
    assert out.isfinite().all()
    for row, (slot, start) in zip(
        (0, 2, 3), zip(spans.slots, spans.starts, strict=True), strict=True
    ):
        before = first_state(state, slot, start)
        results, expected = exact(x[row : row + 1], weight, bias, before, "silu")
        assert relative_error(out[row : row + 1], results) < MAX_ERROR[torch.float32]
        assert torch.equal(after[slot].double(), expected)
    others = [slot for slot in range(len(state)) if slot not in spans.slots]
    assert torch.equal(after[others], state[others])


@pytest.mark.parametrize("operation", [gated_norm, gated_norm_reference])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize(
    ("width", "group_size", "weights", "dtype"),
    [
        (48, 48, 48, torch.float32),
        (60, 20, 60, torch.float32),
        (2100, 2100, 0, torch.float32),
        (32, 8, 8, torch.bfloat16),
    ],
)
def test_gated_norm(device, width, group_size, weights, dtype, norm_before_gate, operation):
    generator = torch.Generator(device).manual_seed(0)
    x, gate = (
        torch.randn(3, width + 2, generator=generator, device=device).to(dtype)[:, 2:]
        for _ in range(2)
    )
    weight = torch.randn(weights, generator=generator, device=device).to(dtype)
    own = weight if weights else None
    out = operation(
        x, gate, own, eps=1e-5, group_size=group_size, norm_before_gate=norm_before_gate
    )
    found, factor = x.double(), F.silu(gate.double())
    if not norm_before_gate or own is None:
        found = found * factor
    if own is not None:
        groups = found.unflatten(1, (-1, group_size))
        groups = groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        found = groups.flatten(1) * weight.double().repeat(width // weights)
        found = found * factor if norm_before_gate else found
    assert out.is_contiguous()
    assert relative_error(out, found) < 2 * MAX_ERROR[dtype]
