"""Guard pages on a GPU: what reads too far reads NaN, in our kernels too, and is no fault."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tests.architectures import OUR_DECODER, VOCAB_SIZE, save_tiny

from aquifer.cache import KV_CACHES, group_cache
from aquifer.cache.base import AttentionOptions, KVLayout, KVPart, LayerKV, Rows, Spans
from aquifer.engine.params import SamplingParams
from aquifer.errors import InvariantError
from aquifer.llm import LLM
from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
LAYOUT = KVLayout((LayerKV(8, 128, 128),) * 32, torch.bfloat16)  # 128 KiB, 16 tokens to a page


def _step(cache: KVPart, slot: int, start: int, count: int, num_decodes: int) -> torch.Tensor:
    """Write tokens [start, start + count) of one layer and attend to all before them."""
    cache.upload()
    spans = Spans.make(np.array([slot]), np.array([start]), np.array([count]))
    view = cache.tensors.view(Rows.of(spans, num_decodes, DEVICE))
    key = torch.ones((count, 8, 128), dtype=torch.bfloat16, device=DEVICE)
    view.write(0, key, key)
    query = torch.ones((count, 32, 128), dtype=torch.bfloat16, device=DEVICE)
    return view.attend(0, query, AttentionOptions(1.0))


@pytest.mark.parametrize("missing", [1, 16, 24])
@pytest.mark.parametrize("num_decodes", [0, 1])
@pytest.mark.parametrize("name", KV_CACHES)
def test_a_wrong_length_shows(name: str, num_decodes: int, missing: int) -> None:
    """A step that is told of more tokens than were written, on the last page and behind it."""
    driver = CudaDriver(0)
    pool = PagePool(driver, 64 * MIB, guards=True)
    cache = group_cache(name)(pool, Owner("m", Kind.KV), LAYOUT, 4, 256)
    for _ in range(2):  # the second time on pages that were left in the slot, or idle
        assert cache.reserve(np.array([2]), np.array([20]))
        assert _step(cache, 2, 0, 20, 0).isfinite().all()
        assert cache.reserve(np.array([2]), np.array([21]))
        assert _step(cache, 2, 20, 1, num_decodes).isfinite().all()
        assert cache.reserve(np.array([2]), np.array([21 + missing + 1]))
        assert _step(cache, 2, 21 + missing, 1, num_decodes).isnan().all()
        pool.check()
        cache.release(2)
    cache.close()
    pool.close()
    driver.close()


def test_a_read_behind_the_last_page_is_no_fault() -> None:
    driver = CudaDriver(0)
    pool = PagePool(driver, 64 * MIB, guards=True)
    cache = group_cache("virtual")(pool, Owner("m", Kind.KV), LAYOUT, 4, 256)
    assert cache.reserve(np.array([2]), np.array([32]))
    assert _step(cache, 2, 0, 32, 0).isfinite().all()
    end = int(cache.ends(np.array([2]))[0]) * 16
    keys, values = cache.tensors.layers[0]
    assert keys[2, end : end + 16].isnan().all()
    assert values[2, end : end + 16].isnan().all()
    cache.release(2)
    cache.close()
    pool.close()
    driver.close()


def test_a_write_to_a_freed_page_is_found() -> None:
    driver = CudaDriver(0)
    pool = PagePool(driver, 64 * MIB, guards=True)
    window = VirtualRange(pool.pages, 2 * MIB, 2 * MIB)
    owner = Owner("m", Kind.KV)
    pages = pool.acquire(owner, 2)
    assert pages is not None
    window.map(0, pages[1:])
    pool.release(pages[:1])
    assert pool.acquire(owner, 1) == pages[:1]
    tensor = window.tensor((2 * MIB,), torch.uint8)
    pool.release(pages[1:])  # although it is mapped
    assert (tensor == 0xFF).all()
    tensor[-1] = 0
    torch.cuda.synchronize()
    with pytest.raises(InvariantError, match=f"freed page was written to: {pages[1]};"):
        pool.acquire(owner, 1)
    driver.close()


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_the_same_tokens(tmp_path: Path, kv_cache: str) -> None:
    save_tiny(OUR_DECODER["llama"](), tmp_path, 5)
    random = Random(0)
    prompts = [[random.randrange(VOCAB_SIZE) for _ in range(n)] for n in (5, 16, 33, 40)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    results = []
    for guard_pages in (False, True):
        with LLM(
            tmp_path,
            device="cuda",
            memory="8GiB",
            dtype="float32",
            kv_cache=kv_cache,
            guard_pages=guard_pages,
        ) as llm:
            outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            llm.engine.pool.check()
        results.append([[each.outputs[0].token_ids for each in one] for one in outputs])
    assert results[0] == results[1]
