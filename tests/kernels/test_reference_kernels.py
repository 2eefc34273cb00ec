"""The plain-torch kernels against the formulas, in float64, written out."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from aquifer.engine.threads import torch_threads
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.attention import attention_contiguous, attention_paged
from aquifer.kernels.linear import linear
from aquifer.kernels.norm import rms_norm
from aquifer.kernels.rotary import rotary

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 4, 40, 48


def exact_attention(
    query: torch.Tensor,  # [tokens, heads, key_dim]
    keys: torch.Tensor,  # [length, kv_heads, key_dim]
    values: torch.Tensor,  # [length, kv_heads, value_dim]
    start: int,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [heads]
    slopes: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Causal attention in float64, computed in a loop over query tokens and heads."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]
    out = torch.empty(*query.shape[:2], values.shape[2], dtype=torch.float64)
    for row in range(len(query)):
        last = start + row
        first = 0 if window_tokens is None else max(0, last - window_tokens + 1)
        for head in range(query.shape[1]):
            k, v = keys[first : last + 1, head // group], values[first : last + 1, head // group]
            scores = k @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[head].double() * torch.arange(last - first, -1, -1)
            top = scores.max()
            if sinks is not None:
                top = torch.maximum(top, sinks[head].double())
            weights = torch.exp(scores - top)
            total = weights.sum()
            if sinks is not None:
                total += torch.exp(sinks[head].double() - top)
            out[row, head] = weights @ v / total
    return out


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window_tokens", [None, 1, 5, 16])
@pytest.mark.parametrize(("has_sinks", "has_slopes"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "key_dim", "value_dim"), [(4, 4, 16, 16), (6, 2, 16, 8)]
)
def test_attention(
    paged,
    dtype,
    softcap,
    window_tokens,
    has_sinks,
    has_slopes,
    num_heads,
    num_kv_heads,
    key_dim,
    value_dim,
):
    """Sequences of one step: decoding, a whole prompt, a chunk in the middle of one."""
    generator = torch.Generator().manual_seed(1)
    slots, starts, counts = [3, 0, 2, 5], [0, 17, 9, 0], [11, 1, 7, 1]
    offsets = [0, 11, 12, 19, 20]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = random(20, 2 * num_heads, key_dim)[:, ::2]  # contiguous in its last dimension only
    keys, values = [], []
    for start, count in zip(starts, counts, strict=True):
        keys.append(random(start + count, num_kv_heads, key_dim))
        values.append(random(start + count, num_kv_heads, value_dim))
    out = torch.full((20, num_heads, value_dim), torch.nan, dtype=dtype)
    sinks = None
    if has_sinks:  # two of them count for nothing, and for everything
        sinks = random(num_heads)
        sinks[:2] = torch.tensor([-1e4, 1e4])
    slopes = alibi_slopes(num_heads, torch.device("cpu")) if has_slopes else None
    kwargs = {"scale": 0.3, "window_tokens": window_tokens, "softcap": softcap}
    kwargs |= {"sinks": sinks, "slopes": slopes}
    # NaN wherever nothing was written: reading it would show.
    if paged:
        tables = torch.full((6, MAX_TOKENS // BLOCK_SIZE), -1)
        all_blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        k_all = torch.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, key_dim), torch.nan, dtype=dtype)
        v_all = torch.full(
            (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, value_dim), torch.nan, dtype=dtype
        )
        for slot, k, v in zip(slots, keys, values, strict=True):
            for position in range(len(k)):
                if position % BLOCK_SIZE == 0:
                    tables[slot, position // BLOCK_SIZE] = all_blocks.pop()
                block = tables[slot, position // BLOCK_SIZE]
                k_all[block, position % BLOCK_SIZE] = k[position]
                v_all[block, position % BLOCK_SIZE] = v[position]
        attention_paged(query, k_all, v_all, tables, slots, starts, offsets, out, **kwargs)
    else:
        width = num_kv_heads * (key_dim + value_dim) + 3  # token-major, with something in between
        flat = torch.full((6, MAX_TOKENS, width), torch.nan, dtype=dtype)
        middle = num_kv_heads * key_dim
        k_all = flat[..., :middle].unflatten(-1, (num_kv_heads, key_dim))
        v_all = flat[..., middle:-3].unflatten(-1, (num_kv_heads, value_dim))
        for slot, k, v in zip(slots, keys, values, strict=True):
            k_all[slot, : len(k)], v_all[slot, : len(v)] = k, v
        attention_contiguous(query, k_all, v_all, slots, starts, offsets, out, **kwargs)
    for i, start in enumerate(starts):
        rows = slice(offsets[i], offsets[i + 1])
        expected = exact_attention(
            query[rows], keys[i], values[i], start, 0.3, window_tokens, softcap, sinks, slopes
        )
        difference = (out[rows].double() - expected).abs().max().item()
        assert difference <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 13, 112])
def test_slopes_equal_those_of_transformers(num_heads):
    """BLOOM's, and MPT's: the biases of a query's own position and of the one before."""
    cpu = torch.device("cpu")
    slopes = alibi_slopes(num_heads, cpu)
    torch.testing.assert_close(slopes, _get_alibi_slopes(num_heads, cpu))
    biases = build_mpt_alibi_tensor(num_heads, 2)[:, 0]
    torch.testing.assert_close(torch.stack((-slopes, 0 * slopes), 1), biases)


def test_window_as_long_as_the_context_is_no_window():
    query, keys, values = (torch.randn(9, 2, 8) for _ in range(3))
    outs = []
    for window_tokens in (None, 9, 100):
        out = torch.empty_like(query)
        attention_contiguous(
            query,
            keys[None],
            values[None],
            [0],
            [0],
            [0, 9],
            out,
            scale=1.0,
            window_tokens=window_tokens,
            softcap=None,
        )
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary(dtype):
    """Dimension i and i + d/2 of a head are one point, turned by the token's angle i."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3, 16, generator=generator).to(dtype)
    angles = torch.randn(5, 8, generator=generator, dtype=torch.float64) * 10
    out = rotary(x, angles.cos().float(), angles.sin().float())
    assert out.dtype == dtype
    points = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = points * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    assert (out.double() - expected).abs().max() <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 300.0])
def test_rms_norm(dtype, magnitude):
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(4, 3, 32, generator=generator) * magnitude).to(dtype)
    weight = torch.randn(32, generator=generator).to(dtype)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert (out.double() - expected).abs().max() <= 4 * TOLERANCE[dtype]


def test_rms_norm_of_zeros_is_zero():
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 64, 300])
@pytest.mark.parametrize("num_rows", [64, 30])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_linear(dtype, num_tokens, num_rows, has_bias, num_threads):
    """The result does not depend on how the product is split."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num_tokens, 48, generator=generator).to(dtype)
    weight = torch.randn(num_rows, 48, generator=generator).to(dtype)
    bias = torch.randn(num_rows, generator=generator).to(dtype) if has_bias else None
    with torch_threads(num_threads):
        out = linear(x, weight, bias)
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (out.double() - expected).abs().max() <= 4 * TOLERANCE[dtype] * expected.abs().max()
