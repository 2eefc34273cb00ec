"""Decode attention against its reference in float64, over KV that is NaN wherever unwritten."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from tests.cases import EVERY_KERNEL_CASE, covering
from tests.kernels.attention_kv import make_sinks, place_kv

from aquifer.kernels import _triton
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.decode_attention import (
    Config,
    DecodeWorkspaces,
    Workspace,
    decode_attention,
    decode_attention_reference,
    default_config,
)

SMALL = Config(kv_heads_per_program=2, block_tokens=8, num_shares=3, num_warps=4, num_stages=3)
MAX_TOKENS = 64
MAX_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BLOCK_SIZES = (None, 16)
FAR_SLOT = 1 << 40  # slot of padding rows: an address that must not be read


@dataclass
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor | None
    slots: torch.Tensor
    lengths: torch.Tensor

    def run(self, config: Config, out: torch.Tensor | None = None, **options) -> torch.Tensor:
        batch, num_heads, _ = self.query.shape
        value_dim = self.values.shape[-1]
        num_kv_heads = self.keys.shape[2]
        workspace = Workspace.empty([config], num_heads, num_kv_heads, value_dim, self.query.device)
        workspace.partials.fill_(torch.nan)
        if out is None:
            out = self.query.new_full((batch, num_heads, value_dim), torch.nan)
        kv = self.keys, self.values, self.tables
        rows = self.slots, self.lengths
        decode_attention(self.query, *kv, *rows, out, workspace, config, **options)
        assert not workspace.counters.any()
        return out

    def reference(self, dtype: torch.dtype = torch.float64, **options) -> torch.Tensor:
        query = self.query.to(dtype)
        out = query.new_empty((*query.shape[:2], self.values.shape[-1]))
        kv = self.keys, self.values, self.tables
        decode_attention_reference(query, *kv, self.slots, self.lengths, out, **options)
        return out

    def cpu(self) -> Case:
        tables = None if self.tables is None else self.tables.cpu()
        kv = self.keys.cpu(), self.values.cpu(), tables
        return Case(self.query.cpu(), *kv, self.slots.cpu(), self.lengths.cpu())


def make_case(
    device: torch.device,
    lengths: list[int],
    *,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 16,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
) -> Case:
    """A case in the second of three layers, token-major; contiguous, or in shuffled blocks."""
    random = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    num_slots = batch + 2
    layer = num_kv_heads * (key_dim + value_dim)
    kv = torch.full((num_slots, max_tokens, 3, layer), torch.nan)
    slots = torch.randperm(num_slots, generator=random)[:batch]
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        kv[slot, :length, 1] = torch.randn(length, layer, generator=random)
    # A view, as a fused projection of queries, keys and values gives it.
    query = torch.full((batch, 2 * num_heads, key_dim), torch.nan)
    query[:, :num_heads] = 2 * torch.randn(batch, num_heads, key_dim, generator=random)
    placed = place_kv(kv, num_kv_heads, key_dim, block_size, random, device, dtype, index_dtype)
    is_padding = torch.tensor(lengths) == 0
    far = FAR_SLOT if index_dtype == torch.int64 else -1
    return Case(
        query.to(device, dtype)[:, :num_heads],
        *placed,
        slots.masked_fill(is_padding, far).to(device, index_dtype),
        torch.tensor(lengths, device=device, dtype=index_dtype),
    )


def row_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    squares = (out.double() - expected).square().flatten(1).sum(1)
    return (squares / expected.square().flatten(1).sum(1)).sqrt()


def max_error(case: Case, expected: torch.Tensor, **options) -> float:
    """The largest relative error that a row may have.

    In float32, at least four times the error of plain torch on a CPU, which depends on the shape.
    Torch cuts long sums into blocks. The kernel adds one product after the other, as the hardware
    does; on the same numbers that alone makes up to 2.2 times the error with heads of 256.
    """
    bar = MAX_ERROR[case.query.dtype]
    if case.query.dtype == torch.float32 and len(expected):
        for name in ("sinks", "slopes"):
            if options.get(name) is not None:
                options[name] = options[name].cpu()
        plain = case.cpu().reference(torch.float32, **options)[(case.lengths > 0).cpu()]
        bar = max(bar, 4 * float(row_errors(plain, expected.cpu()).amax()))
    return bar


def check(case: Case, config: Config, **options) -> None:
    options = {"scale": 0.2, **options}
    out, expected = case.run(config, **options), case.reference(**options)
    assert torch.isfinite(out).all()
    is_padding = case.lengths == 0
    assert (out[is_padding] == 0).all()
    errors = row_errors(out[~is_padding], expected[~is_padding])
    assert (errors < max_error(case, expected[~is_padding], **options)).all()


@pytest.mark.parametrize(
    ("block_size", "num_shares", "merges_itself"),
    covering(BLOCK_SIZES, (1, 3, 40), (True, False), strength=2, every=EVERY_KERNEL_CASE),
)
def test_rows_of_all_lengths_in_any_number_of_shares(device, block_size, num_shares, merges_itself):
    case = make_case(device, [0, 33, 0, 1, 16, 0, 15, 64, 17, 0, 0], block_size=block_size)
    check(case, replace(SMALL, num_shares=num_shares, merges_itself=merges_itself))


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("merges_itself", [True, False])
def test_batch_of_padding(device, block_size, merges_itself):
    case = make_case(device, [0, 0], block_size=block_size)
    check(case, replace(SMALL, merges_itself=merges_itself))


@pytest.mark.gpu  # the interpreter multiplies the bits of bfloat16 as integers
@pytest.mark.parametrize("num_warps", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_programs_of_several_warps_in_half_precision(device, num_warps, kv_heads):
    config = Config(
        kv_heads_per_program=kv_heads,
        block_tokens=16 * num_warps // kv_heads,
        num_shares=16,
        num_warps=num_warps,
        num_stages=3,
        releases_early=kv_heads == 1,
    )
    case = make_case(
        device,
        [2048, 1, 0, 777],
        num_heads=32,
        num_kv_heads=8,
        key_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        max_tokens=2048,
    )
    check(case, config, scale=0.1)


@pytest.mark.parametrize("num_heads", [2, 6])
def test_merge_of_more_partial_results_than_fit_at_once(device, num_heads):
    """64 partial results of a row, and groups of 1 and of 3 heads, which is no power of two."""
    options = {"num_heads": num_heads, "num_kv_heads": 2, "value_dim": 256}
    case = make_case(device, [1024, 3], **options, max_tokens=1024)
    config = Config(1, 16, num_shares=64, num_warps=2, num_stages=2)
    check(case, config)


def test_one_workspace_serves_calls_of_any_shape(device):
    other = replace(SMALL, kv_heads_per_program=4, block_tokens=4, num_shares=7)
    workspace = Workspace.empty([SMALL, other], 8, 4, 16, device)
    for lengths in ([64], [20, 0, 33, 1]):
        for config in (SMALL, other):
            case = make_case(device, lengths)
            out = torch.full_like(case.query, torch.nan)
            arguments = case.query, case.keys, case.values, None, case.slots, case.lengths, out
            decode_attention(*arguments, workspace, config, scale=0.2)
            torch.testing.assert_close(out, case.reference(torch.float32, scale=0.2))
            assert not workspace.counters.any()


def test_workspaces_are_made_once_and_shared(device):
    case, workspaces = make_case(device, [30] * 5), DecodeWorkspaces()
    first, config = workspaces.get(case.query, case.values, paged=False)
    again, _ = workspaces.get(case.query, case.values, paged=False)
    other, other_config = workspaces.get(case.query[:4], case.values, paged=False)
    fewer, _ = workspaces.get(case.query[1:4], case.values, paged=False)
    assert first is again
    assert other is fewer
    assert other.partials.numel() < first.partials.numel() or (
        config.num_shares == other_config.num_shares
    )
    out = torch.full_like(case.query, torch.nan)
    arguments = case.query, case.keys, case.values, None, case.slots, case.lengths, out
    decode_attention(*arguments, first, config, scale=0.2)
    torch.testing.assert_close(out, case.reference(torch.float32, scale=0.2))


@pytest.mark.parametrize(
    ("block_size", "groups"),
    covering(
        BLOCK_SIZES,
        [(1, 8, 8), (1, 1, 1), (4, 4, 4), (4, 8, 8), (7, 2, 2), (7, 2, 1), (8, 2, 2), (2, 6, 2)],
        strength=1,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_groups(device, block_size, groups):
    group, num_kv_heads, kv_heads_per_program = groups
    case = make_case(
        device,
        [33, 20],
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
    )
    block_tokens = 16 // kv_heads_per_program
    check(
        case, replace(SMALL, kv_heads_per_program=kv_heads_per_program, block_tokens=block_tokens)
    )


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("window_tokens", [1, 8, 13, 100])
def test_window(device, block_size, window_tokens):
    case = make_case(device, [33, 0, 1, 13, 50], block_size=block_size)
    check(case, SMALL, window_tokens=window_tokens)


def test_nothing_is_needed_of_blocks_before_the_window(device):
    case = make_case(device, [50, 64], block_size=16)
    assert case.tables is not None
    for row, length in enumerate([50, 64]):
        before = case.tables[case.slots[row], : (length - 10) // 16]
        case.keys[before] = case.values[before] = torch.nan
        case.tables[case.slots[row], : (length - 10) // 16] = -1
    check(case, SMALL, window_tokens=10)


@pytest.mark.parametrize(
    ("window_tokens", "num_shares"),
    covering((1, 10, 24), (1, 3, 40), strength=1, every=EVERY_KERNEL_CASE),
)
def test_nothing_is_read_before_the_window_of_contiguous_kv(device, window_tokens, num_shares):
    """Pages before it are not mapped; they may end at any token, and within one."""
    lengths = [50, 64, 3]
    case = make_case(device, lengths)
    for row, length in enumerate(lengths):
        first = max(length - window_tokens, 0)
        slot = case.slots[row]
        case.keys[slot, :first] = case.values[slot, :first] = torch.nan
    check(case, replace(SMALL, num_shares=num_shares), window_tokens=window_tokens)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(device, softcap):
    check(make_case(device, [33, 1]), SMALL, softcap=softcap)


SINK_SHARES = [
    (1, {}),
    (3, {"window_tokens": 13}),
    (12, {}),
    (12, {"window_tokens": 20, "softcap": 5.0}),
]


@pytest.mark.parametrize(
    ("block_size", "shares", "merges_itself"),
    covering(BLOCK_SIZES, SINK_SHARES, (True, False), strength=2, every=EVERY_KERNEL_CASE),
    ids=str,
)
def test_sinks(device, block_size, shares, merges_itself):
    """Each counts once, whether its row is in one share or in several."""
    num_shares, options = shares
    case = make_case(device, [0, 33, 0, 1, 16, 0, 15, 64, 17, 0, 0], block_size=block_size)
    config = replace(SMALL, num_shares=num_shares, merges_itself=merges_itself)
    check(case, config, sinks=make_sinks(8, device, torch.float32), **options)


ALIBI_SHARES = [(1, {}), (3, {"window_tokens": 13}), (12, {}), (12, {"softcap": 5.0})]


@pytest.mark.parametrize(
    ("block_size", "shares", "num_heads"),
    covering(BLOCK_SIZES, ALIBI_SHARES, (8, 12), strength=2, every=EVERY_KERNEL_CASE),
    ids=str,
)
def test_alibi(device, block_size, shares, num_heads):
    """Keys lose weight with their distance, whether their row is in one share or in several."""
    num_shares, options = shares
    lengths = [0, 33, 1, 16, 0, 64]
    case = make_case(device, lengths, num_heads=num_heads, block_size=block_size)
    config = replace(SMALL, num_shares=num_shares)
    slopes = alibi_slopes(num_heads, device)
    check(case, config, slopes=slopes, **options)
    check(case, config, slopes=slopes, sinks=make_sinks(num_heads, device, torch.float32))


@pytest.mark.parametrize("num_shares", [1, 7])
@pytest.mark.parametrize("merges_itself", [True, False])
def test_sinks_of_groups_that_are_no_power_of_two(device, num_shares, merges_itself):
    case = make_case(device, [33, 20], num_heads=14, num_kv_heads=2)
    config = Config(1, 16, num_shares, num_warps=4, num_stages=3, merges_itself=merges_itself)
    check(case, config, sinks=make_sinks(14, device, torch.float16))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp", "ignore:invalid value")
@pytest.mark.parametrize(
    ("num_shares", "merges_itself"),
    covering((1, 9), (True, False), strength=1, every=EVERY_KERNEL_CASE),
)
def test_sinks_that_count_for_nothing_or_for_everything(device, num_shares, merges_itself):
    case = make_case(device, [33, 0, 64, 1])
    config = replace(SMALL, num_shares=num_shares, merges_itself=merges_itself)
    check(case, config, sinks=torch.full((8,), 14.0, device=device))
    without = case.run(config, scale=0.2)
    for least in (-1e4, -torch.inf):
        sinks = torch.full((8,), least, device=device)
        torch.testing.assert_close(case.run(config, scale=0.2, sinks=sinks), without)
    out = case.run(config, scale=0.2, sinks=torch.full((8,), 1e4, device=device))
    assert (out == 0).all()


@pytest.mark.parametrize("block_tokens", [8, 16, 32])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_tiles_and_blocks_of_different_sizes(device, block_tokens, block_size):
    case = make_case(device, [33, 16], block_size=block_size, index_dtype=torch.int32)
    check(case, replace(SMALL, block_tokens=block_tokens), window_tokens=21)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 80), (96, 64), (8, 24), (128, 256)])
def test_head_dims(device, key_dim, value_dim):
    check(make_case(device, [33, 2], key_dim=key_dim, value_dim=value_dim), SMALL)


def test_half_precision(device):
    case = make_case(device, [33, 2], dtype=torch.float16)
    check(case, SMALL)
    check(case, SMALL, sinks=make_sinks(8, device, torch.bfloat16))


def test_large_scores_do_not_overflow(device):
    check(make_case(device, [40, 3]), SMALL, scale=300.0)


def test_layer_major_strides(device):
    case = make_case(device, [33, 64, 5])
    case.keys, case.values = case.keys.contiguous(), case.values.transpose(1, 2).contiguous()
    case.values = case.values.transpose(1, 2)
    check(case, SMALL)


def test_out_may_be_a_view(device):
    case = make_case(device, [33, 64, 5])
    whole = torch.full((3, 10, 20), 7.0, device=device)
    case.run(SMALL, whole[:, 1:9, 2:18], scale=0.2)
    expected = torch.full_like(whole, 7.0)
    expected[:, 1:9, 2:18] = case.run(SMALL, scale=0.2)
    assert torch.equal(whole, expected)


def test_reference_is_what_torch_calls_attention():
    case = make_case(torch.device("cpu"), [33])
    slot, length = int(case.slots[0]), 33
    expected = F.scaled_dot_product_attention(
        case.query.double().transpose(0, 1)[None],
        case.keys[slot, :length].double().transpose(0, 1)[None],
        case.values[slot, :length].double().transpose(0, 1)[None],
        scale=0.2,
        enable_gqa=True,
    )
    torch.testing.assert_close(case.reference(scale=0.2), expected[0].transpose(0, 1))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window_tokens": 9}])
def test_reference_counts_sinks_in_the_denominator_alone(options):
    """Neither the scale nor the cap of the scores is applied to the sink."""
    case = make_case(torch.device("cpu"), [33])
    sinks = make_sinks(8, torch.device("cpu"), torch.float64)
    first = 33 - options.get("window_tokens", 33)
    keys = case.keys[int(case.slots[0]), first:33].double().repeat_interleave(2, 1)
    scores = torch.einsum("hd,thd->ht", case.query[0].double(), keys) * 0.2
    if "softcap" in options:
        scores = torch.tanh(scores / 2) * 2
    part = torch.sigmoid(scores.logsumexp(-1) - sinks)
    expected = case.reference(scale=0.2, **options) * part[:, None]
    torch.testing.assert_close(case.reference(scale=0.2, sinks=sinks, **options), expected)


def test_workspace_that_is_too_small_is_refused(device):
    case = make_case(device, [5])
    out, counters = torch.empty_like(case.query), torch.zeros(6, dtype=torch.int32, device=device)
    arguments = case.query, case.keys, case.values, None, case.slots, case.lengths, out
    workspace = Workspace(torch.empty(10, device=device), counters)
    with pytest.raises(AssertionError, match="workspace has 10"):
        decode_attention(*arguments, workspace, SMALL, scale=1.0)
    workspace = Workspace(torch.empty(10_000, device=device), counters[:5])
    with pytest.raises(AssertionError, match="too few counters"):
        decode_attention(*arguments, workspace, SMALL, scale=1.0)


# Llama-3-8B, Qwen3-0.6B, Qwen2.5-0.5B, Phi-2, Gemma-2-9B and a model of one KV head
@pytest.mark.parametrize(
    ("block_size", "shape"),
    covering(
        BLOCK_SIZES,
        [(32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 32, 80), (16, 8, 256), (48, 1, 128)],
        strength=1,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_default_config_on_models(device, block_size, shape):
    num_heads, num_kv_heads, head_dim = shape
    if device.type == "cuda":
        dtypes = [torch.bfloat16, torch.float16, torch.float32]
        num_multiprocessors, batches, max_tokens = 132, [1, 5, 64], 1024
    else:
        dtypes, num_multiprocessors, batches, max_tokens = [torch.float32], 1, [2], 64
    for dtype in dtypes:
        for batch in batches:
            lengths = torch.randint(max_tokens + 1, (batch,), generator=torch.Generator()).tolist()
            lengths[0] = max_tokens
            case = make_case(
                device,
                lengths,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                key_dim=head_dim,
                value_dim=head_dim,
                block_size=block_size,
                dtype=dtype,
                max_tokens=max_tokens,
            )
            config = default_config(
                batch,
                num_heads,
                num_kv_heads,
                head_dim,
                dtype,
                num_multiprocessors,
                paged=block_size is not None,
            )
            check(case, config, scale=head_dim**-0.5)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (48, 1, 256)]
)
def test_default_config_by_batch(num_heads, num_kv_heads, head_dim, paged):
    """Tiles are large enough for products, and programs fill the device, at every batch size."""
    for batch in (1, 4, 5, 32, 33, 95, 96, 191, 192, 1000):
        config = default_config(
            batch, num_heads, num_kv_heads, head_dim, torch.bfloat16, 132, paged=paged
        )
        assert num_kv_heads % config.kv_heads_per_program == 0
        group = num_heads // num_kv_heads
        assert config.kv_heads_per_program == 1 or group * config.kv_heads_per_program <= 16
        assert config.block_tokens * config.kv_heads_per_program >= 16
        assert config.block_tokens & (config.block_tokens - 1) == 0
        num_programs = num_kv_heads // config.kv_heads_per_program * config.num_shares
        assert 132 <= num_programs <= 4 * 132


@pytest.mark.gpu  # for graphs are CUDA's
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_captured_graph_follows_lengths_and_tables(device, block_size, overlap, monkeypatch):
    monkeypatch.setattr(_triton, "overlap", overlap)
    lengths = [700, 0, 1, 200, 64]
    case, later = (
        make_case(
            device,
            some,
            num_heads=32,
            num_kv_heads=8,
            key_dim=128,
            value_dim=128,
            block_size=block_size,
            dtype=torch.bfloat16,
            max_tokens=1024,
            seed=seed,
        )
        for seed, some in enumerate([lengths, [0, 1024, 300, 17, 65]])
    )
    config = default_config(5, 32, 8, 128, torch.bfloat16, 132, paged=block_size is not None)
    out = torch.empty_like(case.query)
    workspace = Workspace.empty([config], 32, 8, 128, device)
    arguments = case.query, case.keys, case.values, case.tables, case.slots, case.lengths, out
    decode_attention(*arguments, workspace, config, scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Twice: the second call finds the counters as the first has left them.
        decode_attention(*arguments, workspace, config, scale=0.1)
        out.fill_(torch.nan)
        decode_attention(*arguments, workspace, config, scale=0.1)
    for current in (case, later, case, later):
        case.query.copy_(current.query)
        case.keys.copy_(current.keys)
        case.values.copy_(current.values)
        case.slots.copy_(current.slots)
        case.lengths.copy_(current.lengths)
        if case.tables is not None and current.tables is not None:
            case.tables.copy_(current.tables)
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out.double(), current.reference(scale=0.1), rtol=2e-2, atol=2e-2)
