"""The library of KV tensors: memory under what is asked for, and models of Transformers on it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import OUR_DECODER, TRANSFORMERS, VOCAB_SIZE, save_tiny

from aquifer import vattention
from aquifer.errors import CapacityError, ConfigError

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "vattention.py"
PAGE = 4096
# 2 layers of 2 heads of 16 in float32: 512 bytes a token, 8 tokens to a page
SHAPE: Any = {"layers": 2, "max_batch": 3, "max_length": 64, "kv_heads": 2, "head_dim": 16}


def _open(**options: Any) -> vattention.VAttention:
    base = {"dtype": torch.float32, "page_size": PAGE, "device": "cpu", "memory": 40 * PAGE}
    return vattention.init(**(SHAPE | base | options))


def _until_quiet(kv: vattention.VAttention) -> None:
    """Wait until the background threads have done what was handed to them."""
    calls = -1
    while calls != (calls := kv.num_driver_calls["background"]):
        time.sleep(0.01)


def _decode(kv: vattention.VAttention, lengths: list[int], num_steps: int) -> int:
    """Steps of one token for each running request; the driver's calls in them."""
    num_calls = 0
    for _ in range(num_steps):
        lengths[:] = [length + (length > 0) for length in lengths]
        _until_quiet(kv)
        before = kv.num_driver_calls["step"]
        assert kv.step(lengths)
        num_calls += kv.num_driver_calls["step"] - before
    return num_calls


@pytest.mark.parametrize("kv_layout", ["token-major", "layer-major"])
def test_tensors_have_memory_where_a_step_said_so(kv_layout):
    with _open(kv_layout=kv_layout) as kv:
        assert len(kv) == 2
        assert kv.mapped_bytes == 0
        first, second = kv.alloc_reqid(), kv.alloc_reqid()
        lengths = [0, 0, 0]
        lengths[first], lengths[second] = 5, 30
        assert kv.step(lengths)
        for layer, (keys, values) in enumerate(kv):
            assert keys.shape == values.shape == (3, 64, 2, 16)
            keys[first, :5], values[first, :5] = layer, -layer
            keys[second, :30], values[second, :30] = 10 + layer, 20 + layer
        for layer, (keys, values) in enumerate(kv):
            assert (keys[first, :5] == layer).all()
            assert (values[second, :30] == 20 + layer).all()
        # Whole pages of 8 tokens, or in each of 4 buffers a page of 32 tokens.
        assert kv.mapped_bytes >= (5 if kv_layout == "token-major" else 8) * PAGE
        kv.free_reqid(first)
        kv.free_reqid(second)
        assert kv.mapped_bytes == 0


def test_a_step_that_does_not_fit_changes_nothing():
    with _open(memory=6 * PAGE, overlap=False, eager_pages=0) as kv:
        first, second = kv.alloc_reqid(), kv.alloc_reqid()
        lengths = [0, 0, 0]
        lengths[first] = 33
        assert kv.step(lengths)
        before = kv.mapped_bytes
        lengths[second] = 30
        assert not kv.step(lengths)
        assert kv.mapped_bytes == before
        kv.free_reqid(first)
        lengths[first] = 0
        assert kv.step(lengths)


def test_misuse_is_told():
    with pytest.raises(ConfigError, match="kv_heads is 0; it must be a whole number of at least 1"):
        _open(kv_heads=0)
    with pytest.raises(ConfigError, match=r"head_dim is 2\.5; it must be a whole number of at"):
        _open(head_dim=2.5)
    with pytest.raises(ConfigError, match=r"page_size is 6.00 KiB; it must be a multiple of 4.00"):
        _open(page_size=6 << 10)
    with pytest.raises(ConfigError, match="kv_layout is 'NHD'; choose token-major or layer-major"):
        _open(kv_layout="NHD")
    with pytest.raises(ConfigError, match=r"prompt_page_size is 6.00 KiB; it must be a multiple"):
        _open(prompt_page_size="6KiB")
    for name in ("page_size", "memory", "prompt_page_size"):
        with pytest.raises(ConfigError, match=f"{name} is -4096; it must be at least 1"):
            _open(**{name: -4096})
    with pytest.raises(ConfigError, match=r"memory is 4.00 KiB; it must be at least a page, 8.00"):
        _open(memory=PAGE, page_size=2 * PAGE)
    with pytest.raises(ConfigError, match="prompt_page_size is for token-major"):
        _open(prompt_page_size=4 * PAGE, kv_layout="layer-major")
    with pytest.raises(ConfigError, match="eager_pages is -1; it must be at least 0"):
        _open(eager_pages=-1)
    with pytest.raises(ConfigError, match=r"reclaim_below is 10; it must be from 0 to 1"):
        _open(reclaim_below=10)
    with _open() as kv:
        with pytest.raises(ConfigError, match="prompt_length is 65; it must be from 0 to 64"):
            kv.alloc_reqid(65)
        ids = [kv.alloc_reqid() for _ in range(3)]
        assert sorted(ids) == [0, 1, 2]
        with pytest.raises(CapacityError, match="3 requests run already"):
            kv.alloc_reqid()
        kv.free_reqid(1)
        with pytest.raises(ConfigError, match="request 1 does not run"):
            kv.free_reqid(1)
        with pytest.raises(ConfigError, match="request 1 was not allocated"):
            kv.step([0, 5, 0])
        with pytest.raises(ConfigError, match="lengths must be from 0 to 64"):
            kv.step([65, 0, 0])
        with pytest.raises(ConfigError, match=r"lengths has shape \(2,\)"):
            kv.step([1, 1])
        no_lengths: list[Any] = [[1.5, 0, 0], [float("nan"), 0, 0], [10**30, 0, 0]]
        for lengths in no_lengths:
            with pytest.raises(ConfigError, match="it must hold whole numbers"):
                kv.step(lengths)


def test_calls_after_close_are_told():
    """After `close`, its addresses may belong to other memory, so each call is refused."""
    with _open() as kv:
        reqid = kv.alloc_reqid()
    kv.close()
    for call in (kv.alloc_reqid, lambda: kv.free_reqid(reqid), lambda: kv.step([1, 0, 0])):
        with pytest.raises(ConfigError, match="the tensors are closed; call init for others"):
            call()


def test_pages_for_the_next_step_are_mapped_in_the_background():
    with _open() as kv:
        lengths = [0, 0, 0]
        for _ in range(2):
            lengths[kv.alloc_reqid()] = 9
        assert kv.step(lengths)
        background = kv.num_driver_calls["background"]
        assert _decode(kv, lengths, 40) == 0
        assert kv.num_driver_calls["background"] > background
    with _open(overlap=False) as kv:
        lengths[:] = [0, 0, 0]
        lengths[kv.alloc_reqid()] = 9
        assert kv.step(lengths)
        assert _decode(kv, lengths, 40) >= 2


@pytest.mark.parametrize("deferred", [True, False])
def test_a_request_takes_over_the_pages_of_the_last_one(deferred):
    """Deferred reclamation (section 5.4.2): no call of the driver for what is mapped already."""
    with _open(deferred=deferred, eager_pages=0, overlap=False) as kv:
        for _ in range(2):
            reqid = kv.alloc_reqid()
            assert reqid == 0
            _until_quiet(kv)
            before = kv.num_driver_calls["step"]
            assert kv.step([40, 0, 0])
            num_calls = kv.num_driver_calls["step"] - before
            kv.free_reqid(reqid)
        assert (num_calls == 0) == deferred


def test_a_prompt_in_large_pages():
    with _open(prompt_page_size=4 * PAGE, overlap=False, eager_pages=0) as kv:
        reqid = kv.alloc_reqid(prompt_length=60)
        lengths = [0, 0, 0]
        lengths[reqid] = 60
        assert kv.step(lengths)
        keys, _ = kv[1]
        keys[reqid, :60] = 1.0
        assert _decode(kv, lengths, 4) <= 2
        assert kv.mapped_bytes == 8 * PAGE


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("vattention_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@torch.inference_mode()
def test_transformers_generates_the_same_tokens(name, example, tmp_path):
    """With the example's loop and an unmodified kernel; also where requests begin again."""
    model: Any = save_tiny((OUR_DECODER | TRANSFORMERS)[name](), tmp_path, 2).float()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 12, 33)]
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
        expected.append(out[0, len(prompt) :].tolist())
    config = model.config
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    token_bytes = 2 * config.num_hidden_layers * kv_heads * dim * 4
    for memory in (1 << 20, -(-46 * token_bytes // PAGE) * PAGE + PAGE):
        with vattention.init(
            config.num_hidden_layers, 4, 64, kv_heads, dim, torch.float32, PAGE,
            device="cpu", memory=memory,
        ) as kv:  # fmt: skip
            assert example.generate(model, kv, prompts, 12, example.KERNELS["sdpa"]) == expected


def test_the_example_runs_as_it_says():
    output = subprocess.run(
        [sys.executable, EXAMPLE, "--max-tokens", "8", "Once upon a time"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.startswith("Once upon a time|")
    assert len(output) > len("Once upon a time|") + 8
