"""Shards of parameters: the bytes of a checkpoint that they are read from, and random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.checkpoints import save_checkpoint
from tests.mxfp4 import pack

from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.forms import Form, RowOrder
from aquifer.weights.loader import plan_stretches, scatter
from aquifer.weights.parameters import Parameter, Source
from aquifer.weights.shards import Shard
from aquifer.weights.store import WeightStore

_HALVES = slice(0, 12), slice(12, 24)
_GATED = RowOrder(4, (3, 3), (1, 0))  # four heads' queries and gates; all gates come first here
_MXFP4 = Form.MXFP4_BLOCKS, Form.MXFP4_SCALES

PARAMETERS: dict[str, tuple[tuple[int, ...], list[Source]]] = {
    "plain": ((12, 8), [Source("a")]),
    "vector": ((12,), [Source("vector")]),
    "fused": ((24, 8), [Source("a", _HALVES[:1]), Source("b", _HALVES[1:])]),
    "scaled": ((12, 8), [Source.of("a", [(4, 2.0), (6, 1.0), (2, 0.5)])]),
    "gated": (
        (32, 8),
        [Source("gated", (slice(0, 24),), order=_GATED), Source("c", (slice(24, 32),))],
    ),
    "by head": ((4, 8), [Source(f"head{i}", (i,)) for i in range(4)]),
    "experts": (
        (2, 24, 8),
        [Source(n, (i, h)) for i in range(2) for n, h in zip("ab", _HALVES, strict=True)],
    ),
    "stacked": ((3, 24, 8), [Source("stacked")]),
    "transposed": ((3, 24, 8), [Source("in_out", form=Form.TRANSPOSED)]),
    "numbers": ((3, 8, 128), [Source(f"{form.name}", form=form) for form in _MXFP4]),
}
SHARDS = [
    ("plain", Shard(0, 12, ((2, 5),), 3)),
    ("plain", Shard(0, 12, ((8, 12),), 7)),
    ("plain", Shard(1, 8, ((4, 8),), 4)),
    ("plain", Shard(0, 12, (), 12)),
    ("vector", Shard(0, 12, ((6, 9), (0, 2)), 6)),
    ("fused", Shard(0, 24, ((3, 6), (9, 15), (20, 22)), 11)),
    ("fused", Shard(1, 8, ((0, 3),), 3)),
    ("scaled", Shard(0, 12, ((2, 5), (9, 12)), 6)),
    ("scaled", Shard(1, 8, ((2, 8),), 6)),
    ("gated", Shard(0, 32, ((3, 9), (15, 21), (28, 32)), 16)),
    ("by head", Shard(0, 4, ((1, 3),), 2)),
    ("by head", Shard(1, 8, ((1, 3),), 2)),
    ("experts", Shard(1, 24, ((6, 12), (18, 24)), 12)),
    ("experts", Shard(2, 8, ((2, 4),), 2)),
    ("stacked", Shard(1, 24, ((6, 12), (18, 24)), 12)),
    ("stacked", Shard(2, 8, ((5, 8),), 3)),
    ("transposed", Shard(1, 24, ((12, 24),), 12)),
    ("transposed", Shard(2, 8, ((0, 4),), 4)),
    ("numbers", Shard(1, 8, ((2, 4),), 2)),
    ("numbers", Shard(2, 128, ((64, 96),), 32)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    generator = torch.Generator().manual_seed(0)
    shapes = {"vector": (12,), "a": (12, 8), "b": (12, 8), "c": (8, 8), "gated": (24, 8)}
    shapes |= {f"head{i}": (8,) for i in range(4)}
    shapes |= {"stacked": (3, 24, 8), "in_out": (3, 8, 24)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    packed = pack(torch.randn(3, 8, 128, generator=generator))
    tensors |= {form.name: part for form, part in zip(_MXFP4, packed, strict=True)}
    folder = tmp_path_factory.mktemp("shards") / "model"
    return Checkpoint.open(save_checkpoint(folder, {"model_type": "none"}, tensors))


@contextmanager
def store_of(*parameters: Parameter) -> Iterator[WeightStore]:
    pool = PagePool(HostDriver(), 4 << 20, 4096)
    store = WeightStore(pool, Owner("a", Kind.WEIGHTS), parameters)
    assert store.populate()
    for tensor in store.tensors.values():
        tensor.fill_(7)
    yield store
    store.close()
    pool.close()


def parameter(name: str, dtype: torch.dtype = torch.float32) -> Parameter:
    shape, sources = PARAMETERS[name]
    return Parameter(name, shape, dtype, tuple(sources))


def part_of(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    indices = [i for start, stop in shard.ranges for i in range(start, stop)]
    part = whole.index_select(shard.dim, torch.tensor(indices, dtype=torch.int64))
    shape = list(whole.shape)
    shape[shard.dim] = shard.size - len(indices)
    return torch.cat([part, whole.new_zeros(shape)], dim=shard.dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "shard"), SHARDS)
def test_a_shard_is_a_part_of_the_whole(
    checkpoint: Checkpoint, name: str, shard: Shard, dtype: torch.dtype
) -> None:
    whole = parameter(name, dtype)
    own = whole.sharded(shard)
    assert own.whole_shape == whole.shape
    with store_of(whole) as store:
        store.load(checkpoint)
        expected = part_of(store.tensors[name], shard)
    with store_of(own) as store:
        store.load(checkpoint)
        assert torch.equal(store.tensors[name], expected)
        store.tensors[name][:] = expected
        # As for a device: in stretches through a buffer.
        jobs = store.jobs(checkpoint)
        for max_bytes in (128, 200, 1 << 20):
            store.tensors[name][expected != 0] = 7
            for stretch in plan_stretches(jobs, max_bytes):
                buffer = torch.full((stretch.num_bytes,), 0xA5, dtype=torch.uint8)
                stretch.read(buffer)
                scatter(buffer, stretch)
            assert torch.equal(store.tensors[name], expected)


@pytest.mark.parametrize("name", ["plain", "experts", "stacked", "transposed", "numbers"])
def test_ranks_read_each_byte_once(checkpoint: Checkpoint, name: str) -> None:
    """Two ranks together read all bytes, and each byte is read by one of them."""
    whole = parameter(name)
    dim = len(whole.shape) - 1
    size = whole.shape[dim]
    arrived = Counter[int]()
    for start in (0, size // 2):
        shard = Shard(dim, size, ((start, start + size // 2),), size // 2)
        with store_of(whole.sharded(shard)) as store:
            seen_bytes: list[int] = []
            store.load(checkpoint, seen_bytes.append)
            for stored, _ in store.jobs(checkpoint):
                for offset, count in stored.places(0, stored.num_bytes):
                    arrived.update(range(offset, offset + count))
            assert sum(seen_bytes) == sum(s.num_bytes for s, _ in store.jobs(checkpoint))
    names = {source.name for source in whole.sources}
    stored_bytes = sum(checkpoint.tensors[each].num_bytes for each in names)
    if name == "experts":
        assert set(arrived.values()) == {2}  # both experts of this test are the same
        assert len(arrived) == stored_bytes
    else:
        assert set(arrived.values()) == {1}
        assert len(arrived) == stored_bytes


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_random_numbers_are_the_same_at_any_size(dim: int) -> None:
    """Parameters of several blocks of random numbers, one of which has a block for each row."""
    shapes = {"many rows": (40, 700, 640), "long rows": (3, 4200, 3996)}
    for name, shape in shapes.items():
        whole = Parameter(name, shape, torch.bfloat16, ())
        size = shape[dim]
        ranges = ((size // 3, size // 2), (size // 2, size))
        shard = Shard(dim, size, ranges, size - size // 3 + 1)
        pool = PagePool(HostDriver(), 1 << 29, 1 << 16)
        stores = [
            WeightStore(pool, Owner(each.name, Kind.WEIGHTS), [each])
            for each in (whole, whole.sharded(shard))
        ]
        for store in stores:
            assert store.populate()
            store.fill_random(3)
        first, second = (store.tensors[name] for store in stores)
        assert torch.equal(part_of(first, shard), second)
        assert abs(float(first.float().std()) - 0.02) < 1e-3
        for store in stores:
            store.close()
        pool.close()
