"""Weights on their way to a GPU: every byte arrives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.forms import Form, Target
from aquifer.weights.parameters import Parameter, Source
from aquifer.weights.store import WeightStore

OWNER = Owner("a", Kind.WEIGHTS)
HIDDEN = 4096
NUM_LAYERS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2 GB in two files: large and small tensors, most in bfloat16, one in float32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype).cpu()

    tensors = {"embed": random(64_000, HIDDEN)}
    for i in range(NUM_LAYERS):
        tensors |= {
            f"{i}.norm": random(HIDDEN),
            f"{i}.q": random(HIDDEN, HIDDEN),
            f"{i}.k": random(1024, HIDDEN),
            f"{i}.up": random(5000, HIDDEN),
            f"{i}.scale": random(1),
        }
    tensors["head"] = random(16_000, HIDDEN, dtype=torch.float32)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def pool(driver: CudaDriver) -> Iterator[PagePool]:
    pool = PagePool(driver, 6 << 30)
    yield pool
    pool.close()


def _parameters(checkpoint: Checkpoint, dtype: torch.dtype) -> list[Parameter]:
    """One for each stored tensor, but for q and k, which go into one; up is transposed."""
    parameters = [
        Parameter(name, stored.shape, dtype, (Source(name),))
        for name, stored in checkpoint.tensors.items()
        if not name.endswith((".q", ".k", ".up"))
    ]
    for i in range(NUM_LAYERS):
        sources = (
            Source(f"{i}.q", (slice(0, HIDDEN),)),
            Source(f"{i}.k", (slice(HIDDEN, HIDDEN + 1024),)),
        )
        parameters.append(Parameter(f"{i}.qk", (HIDDEN + 1024, HIDDEN), dtype, sources))
        up = Source(f"{i}.up", form=Form.TRANSPOSED)
        parameters.append(Parameter(f"{i}.up", (HIDDEN, 5000), dtype, (up,)))
    return parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_loaded_is_what_is_stored(folder, pool, dtype):
    checkpoint = Checkpoint.open(folder)
    store = WeightStore(pool, OWNER, _parameters(checkpoint, dtype))
    assert store.populate()
    for tensor in store.tensors.values():
        tensor.fill_(float("nan"))
    seen_bytes: list[int] = []
    store.load(checkpoint, seen_bytes.append)
    assert sum(seen_bytes) == checkpoint.num_bytes
    expected = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    for i in range(NUM_LAYERS):
        expected[f"{i}.qk"] = torch.cat([expected.pop(f"{i}.q"), expected.pop(f"{i}.k")])
        expected[f"{i}.up"] = expected[f"{i}.up"].T
    assert expected.keys() == store.tensors.keys()
    for name, tensor in expected.items():
        assert torch.equal(store.tensors[name], tensor.cuda().to(dtype)), name
    store.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales_first", [False, True])
def test_mxfp4(pool: PagePool, tmp_path: Path, scales_first: bool, dtype: torch.dtype) -> None:
    """The device decodes every byte under every scale as the host does, in bounded memory."""
    blocks = torch.randint(256, (12, 2050, 60, 16), dtype=torch.uint8)  # 22.5 MiB: two stretches
    blocks[0, :256, :16] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.randint(118, 138, blocks.shape[:-1], dtype=torch.uint8)
    scales[0, :256, :16] = torch.arange(256, dtype=torch.uint8)[:, None]
    expected = torch.empty(12, 2050, 60 * 32, dtype=dtype)
    Target(expected, Form.MXFP4_BLOCKS).write(blocks.flatten(), 0)
    Target(expected, Form.MXFP4_SCALES).write(scales.flatten(), 0)
    names = ("b", "a" if scales_first else "c")  # tensors of a file are in the order of names
    save_file(dict(zip(names, (blocks, scales), strict=True)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    forms = (Form.MXFP4_BLOCKS, Form.MXFP4_SCALES)
    sources = tuple(Source(name, form=form) for name, form in zip(names, forms, strict=True))
    parameter = Parameter("w", tuple(expected.shape), dtype, sources)
    store = WeightStore(pool, OWNER, [parameter])
    assert store.populate()
    for _ in range(2):
        store.tensors["w"].fill_(float("nan"))
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        seen_bytes: list[int] = []
        store.load(checkpoint, seen_bytes.append)
        assert torch.cuda.max_memory_allocated() - before_bytes < 48 << 20  # 16 are the stage
        assert sum(seen_bytes) == checkpoint.num_bytes
        bits = torch.int32 if dtype.itemsize == 4 else torch.int16
        assert torch.equal(store.tensors["w"].cpu().view(bits), expected.view(bits))
    store.close()


def test_a_file_that_ends_early_leaves_nothing_behind(pool, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(100 << 20, dtype=torch.bfloat16)}, file)
    checkpoint = Checkpoint.open(tmp_path)
    with file.open("r+b") as stream:
        stream.truncate(90 << 20)
    parameters = [Parameter("w", (100 << 20,), torch.bfloat16, (Source("w"),))]
    store = WeightStore(pool, OWNER, parameters)
    assert store.populate()
    with pytest.raises(ValueError, match="ended early"):
        store.load(checkpoint)
    store.close()
    torch.cuda.synchronize()
