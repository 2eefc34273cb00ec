"""MXFP4: every number decoded as the format says and as Transformers does, in any pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.mxfp4 import pack, unpack
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aquifer.errors import ConfigError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights.checkpoint import Checkpoint, read_range
from aquifer.weights.forms import Form, Target
from aquifer.weights.loader import plan_stretches, scatter
from aquifer.weights.parameters import Parameter, Source, check_sources
from aquifer.weights.store import WeightStore

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SOURCES = (Source("w_blocks", form=Form.MXFP4_BLOCKS), Source("w_scales", form=Form.MXFP4_SCALES))


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, but that any NaN equals any other."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    bits = BITS[found.dtype.itemsize]
    same = found.contiguous().view(bits) == expected.contiguous().view(bits)
    assert (same | found.isnan()).all()


def every_number() -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [256, 16, 16] with every byte, under every scale [256, 16]."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    return blocks, torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)


def random_numbers(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of [..., out, in]; products are normal numbers of a float16."""
    generator = torch.Generator().manual_seed(0)
    blocks = (*shape[:-1], shape[-1] // 32, 16)
    return (
        torch.randint(256, blocks, dtype=torch.uint8, generator=generator),
        torch.randint(118, 138, blocks[:-1], dtype=torch.uint8, generator=generator),
    )


def decoded(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Written at once."""
    out = torch.full((*blocks.shape[:-2], blocks.shape[-2] * 32), torch.nan, dtype=dtype)
    Target(out, Form.MXFP4_BLOCKS).write(blocks.flatten(), 0)
    Target(out, Form.MXFP4_SCALES).write(scales.flatten(), 0)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_under_every_scale(dtype: torch.dtype) -> None:
    blocks, scales = every_number()
    found = decoded(blocks, scales, dtype)
    assert_same_bits(found, unpack(blocks, scales).to(dtype))
    if dtype != torch.float16:
        assert found[:253].isfinite().all()
    unscaled = found[127].abs()
    assert sorted(set(unscaled.tolist())) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    if dtype != torch.float64:  # the scale that stands for NaN
        assert torch.equal(
            found[255].isfinite(), unscaled <= (0 if dtype == torch.float16 else 0.5)
        )


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_as_transformers_decodes(dtype: torch.dtype) -> None:
    for blocks, scales in (every_number(), random_numbers(64, 96)):
        expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0]
        assert_same_bits(decoded(blocks, scales, dtype), expected.T)  # theirs is [in, out]


def test_what_the_packer_packs_is_decoded() -> None:
    weights = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    blocks, scales = pack(weights)
    found = decoded(blocks, scales, torch.float32)
    assert (found - weights).abs().max() <= 0.25 * weights.abs().max()
    assert all(map(torch.equal, pack(found), (blocks, scales)))


def test_more_than_a_step() -> None:
    """2.2 MiB, in pieces that begin and end anywhere."""
    blocks, scales = random_numbers(1100, 4160)
    expected = decoded(blocks[:2], scales[:2], torch.bfloat16)
    out = torch.empty(1100, 4160, dtype=torch.bfloat16)
    numbers, factors = Target(out, Form.MXFP4_BLOCKS), Target(out, Form.MXFP4_SCALES)
    for target, stored, cuts in (
        (numbers, blocks.flatten(), (0, 7, 8, 1 << 20, 2_200_001, blocks.numel())),
        (factors, scales.flatten(), (0, 1, 70_000, 70_003, scales.numel())),
    ):
        for begin, end in pairwise(cuts):
            target.write(stored[begin:end], begin)
    assert torch.equal(out[:2], expected)
    in_transformers = convert_moe_packed_tensors(blocks[None], scales[None])[0].T
    assert_same_bits(out, in_transformers)


# --- from files ----------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[PagePool]:
    driver = HostDriver()
    pool = PagePool(driver, 4 << 20, 4096)
    yield pool
    pool.close()
    driver.close()


def save(folder: Path, *files: dict[str, torch.Tensor]) -> Checkpoint:
    """Save tensors in files that are read in the order given."""
    weight_map = {}
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"{i}.safetensors")
        weight_map.update(dict.fromkeys(tensors, f"{i}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return Checkpoint.open(folder)


def test_the_order_of_the_files_does_not_matter(pool: PagePool, tmp_path: Path) -> None:
    """Numbers are read before their scales, in one file, in two, and in two the other way round."""
    blocks, scales = random_numbers(5, 24, 64)
    expected = unpack(blocks, scales).bfloat16()
    both = {"w_blocks": blocks, "w_scales": scales}
    after, before = {"w_scales": scales, "x": torch.ones(3)}, {"w_blocks": blocks}
    # Tensors of a file are in the order of their names.
    reverse = {"a_scales": scales, "b_blocks": blocks}
    for i, (files, names) in enumerate(
        [
            ([both], ("w_blocks", "w_scales")),
            ([before, after], ("w_blocks", "w_scales")),
            ([after, before], ("w_blocks", "w_scales")),
            ([reverse], ("b_blocks", "a_scales")),
        ]
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        checkpoint = save(folder, *files)
        sources = tuple(
            Source(name, (slice(1, 6),), source.form)
            for name, source in zip(names, SOURCES, strict=True)
        )
        store = WeightStore(pool, Owner("a", Kind.WEIGHTS), [_parameter(sources)])
        assert store.populate()
        stored = [checkpoint.tensors[name] for name in names]
        assert [each for each, _ in store.jobs(checkpoint)] == stored
        for _ in range(2):  # once more, as after an eviction
            store.tensors["w"].fill_(7)
            seen_bytes: list[int] = []
            store.load(checkpoint, seen_bytes.append)
            assert seen_bytes == [blocks.nbytes, scales.nbytes]
            assert torch.equal(store.tensors["w"][1:], expected)
            assert (store.tensors["w"][0] == 7).all()
        store.close()


def _parameter(sources: tuple[Source, ...] = SOURCES) -> Parameter:
    """Return a parameter of six experts, which `sources` fill wholly or in part."""
    return Parameter("w", (6, 24, 64), torch.bfloat16, sources)


@pytest.mark.parametrize("max_bytes", [256, 1000, 1 << 20])
@pytest.mark.parametrize("scales_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_in_stretches(
    max_bytes: int, scales_first: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    blocks, scales = random_numbers(5, 24, 64)
    names = ("b_blocks", "a_scales") if scales_first else ("b_blocks", "c_scales")
    stored = dict(zip(names, (blocks, scales), strict=True))
    checkpoint = save(tmp_path, stored | {"d": torch.ones(5)})
    out = torch.empty(5, 24, 64, dtype=dtype)
    jobs = [
        (checkpoint.tensors[name], Target(out, source.form))
        for name, source in zip(names, SOURCES, strict=True)
    ]
    stretches = plan_stretches(jobs, max_bytes)
    for stretch in stretches:
        assert 0 < stretch.end_bytes - stretch.begin_bytes <= max_bytes
        stage = torch.empty(stretch.end_bytes - stretch.begin_bytes, dtype=torch.uint8)
        read_range(stretch.file, stretch.begin_bytes, stage)
        scatter(stage, stretch)
    pieces = [piece for stretch in stretches for piece in stretch.pieces]
    assert sum(piece.num_bytes for piece in pieces) == blocks.nbytes + scales.nbytes
    assert_same_bits(out, unpack(blocks, scales).to(dtype))


DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scales": (lambda t: t.pop("w_scales"), r"lacks the tensor 'w_scales'"),
    "no blocks": (lambda t: t.pop("w_blocks"), r"lacks the tensor 'w_blocks'"),
    "fewer scales": (
        lambda t: t.update(w_scales=t["w_scales"][..., :1].clone()),
        r"'w_scales' has shape \[6, 24, 1\], its config calls for \[6, 24, 2\]",
    ),
    "flat blocks": (
        lambda t: t.update(w_blocks=t["w_blocks"].flatten(-2)),
        r"'w_blocks' has shape \[6, 24, 32\], its config calls for \[6, 24, 2, 16\]",
    ),
    "blocks of floats": (
        lambda t: t.update(w_blocks=t["w_blocks"].bfloat16()),
        r"'w_blocks' is stored as torch.bfloat16; MXFP4 is stored as torch.uint8",
    ),
    "signed scales": (
        lambda t: t.update(w_scales=t["w_scales"].view(torch.int8)),
        r"'w_scales' is stored as torch.int8; MXFP4 is stored as torch.uint8",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(damage: str, tmp_path: Path) -> None:
    act, message = DAMAGE[damage]
    blocks, scales = random_numbers(6, 24, 64)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    check_sources(save(tmp_path, tensors), [_parameter()])
    act(tensors)
    with pytest.raises(ConfigError, match=message):
        check_sources(save(tmp_path, tensors), [_parameter()])
