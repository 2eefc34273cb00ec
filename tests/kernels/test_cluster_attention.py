"""Attention by clusters against its reference in float64, over KV that is NaN if unwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.test_decode_attention import Case, check, make_case

from aquifer.kernels import cluster_attention
from aquifer.kernels._cuda import has_large_blocks
from aquifer.kernels._triton import count_multiprocessors
from aquifer.kernels.decode_attention import (
    Config,
    DecodeWorkspaces,
    decode_attention,
    default_config,
)

pytestmark = pytest.mark.gpu

LENGTHS = {
    "one token": [1],
    "one row": [577],
    "a long row": [20_011],
    "tiles and their neighbours": [15, 16, 17, 255, 256, 257, 1, 31],
    "whole rows": [300, 577, 1024, 640, 512, 100, 999, 733],
    "more rows than clusters": list(range(20, 340, 20)),
    "one much longer": [12_000, *[40] * 15],
    "a long one last": [*[100] * 6, 9_000],
    "all long": [4096, 4100, 5000, 3000],
    "padding": [0, 700, 0, 0, 3000, 0, 17, 0],
    "padding alone": [0, 0],
}


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda", 0)
    if not has_large_blocks(device):
        pytest.skip("needs a GPU with clusters (Hopper or later)")
    return device


def clusters(case: Case) -> Config:
    """The default config, but with clusters for any number of rows."""
    batch, num_heads, head_dim = case.query.shape
    assert cluster_attention.can_read(case.query, case.keys, case.values)
    sms = count_multiprocessors(case.query.device)
    config = default_config(
        batch, num_heads, case.values.shape[2], head_dim, case.values.dtype, sms, paged=False
    )
    return replace(config, by_clusters=True)


def make(device: torch.device, lengths: list[int], **shape) -> Case:
    shape = {"num_heads": 32, "num_kv_heads": 8, "key_dim": 128, **shape}
    dtype = shape.pop("dtype", torch.bfloat16)
    return make_case(
        device,
        lengths,
        value_dim=shape["key_dim"],
        dtype=dtype,
        max_tokens=max(*lengths, 16),
        **shape,
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(device, lengths):
    case = make(device, lengths)
    check(case, clusters(case))


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads(device, key_dim, group, dtype):
    for num_kv_heads in (1, 4, 16):
        case = make(
            device,
            [577, 12, 3000, 0, 1025],
            num_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            dtype=dtype,
            index_dtype=torch.int32 if group == 3 else torch.int64,
        )
        check(case, clusters(case))


@pytest.mark.parametrize("seed", range(20))
def test_random_lengths(device, seed):
    random = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 17, (1,), generator=random))
    most = int(torch.randint(1, 6000, (1,), generator=random))
    lengths = torch.randint(0, most + 1, (batch,), generator=random).tolist()
    case = make(device, lengths, seed=seed)
    check(case, clusters(case))


def test_that_the_config_is_chosen(device):
    case = make(device, [577] * 4)
    for rows, is_chosen in ((1, False), (2, True), (8, True), (9, False)):
        query = case.query[:1].expand(rows, -1, -1)
        _, config = DecodeWorkspaces().get(query, case.values, paged=False)
        assert config.by_clusters == is_chosen
    _, config = DecodeWorkspaces().get(case.query, case.values, paged=True)
    assert not config.by_clusters


def test_options_that_clusters_do_not_know(device):
    case = make(device, [577, 80])
    check(case, clusters(case), window_tokens=64)
    check(case, clusters(case), softcap=20.0)


def test_layers_in_a_graph(device):
    """Each launch begins before the one before it has ended, whose result is its query."""
    case = make(device, [2000, 577, 40])
    config = clusters(case)
    workspace, _ = DecodeWorkspaces().get(case.query, case.values, paged=False)
    outs = [torch.empty_like(case.query, memory_format=torch.contiguous_format) for _ in range(12)]

    def run() -> None:
        query = case.query
        for out in outs:
            kv = case.keys, case.values, None
            rows = case.slots, case.lengths
            decode_attention(query, *kv, *rows, out, workspace, config, scale=0.1)
            query = out

    run()
    torch.cuda.synchronize()
    expected = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            # Partial results are added up in any order.
            assert torch.allclose(out.float(), wanted.float(), rtol=0.02, atol=0.002)
    assert not workspace.counters.any()
