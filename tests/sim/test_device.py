"""The modelled device: shapes, step times and their fit, and memory without any backing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.architectures import MAX_TOKENS, TRANSFORMERS, VOCAB_SIZE
from tests.checkpoints import tiny_llama

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.config import BUNDLED_MODELS
from aquifer.errors import ConfigError, DriverError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.sim.device import (
    DEVICES,
    MODELS,
    StepModel,
    StepWork,
    find_device,
    find_model,
)
from aquifer.sim.driver import PAGE_BYTES, ModelledDriver

OPT = MODELS["opt-13b"]
A100 = DEVICES["a100-40g"]


def test_shapes_are_those_of_table_1():
    assert OPT.kv_layout.token_bytes == 2 * 40 * 5120 * 2  # section 3: 800 KB
    expected_gb = {"opt-13b": 26, "opt-66b": 132, "opt-175b": 346, "llama-13b": 26}
    for name, gigabytes in expected_gb.items():
        assert MODELS[name].weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.015)
    assert MODELS["llama-3-8b"].weight_bytes / 2e9 == pytest.approx(8.03, rel=1e-3)


def test_a_shape_from_a_config(tmp_path):
    shape = find_model(str(tiny_llama(tmp_path / "tiny")))
    (tmp_path / "tiny" / "model.safetensors").unlink()
    assert find_model(str(tmp_path / "tiny")) == shape  # no weights are needed
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    body = layers * (2 * hidden * (queries + keys) + 3 * hidden * config["intermediate_size"])
    assert shape.body_parameters == body
    assert shape.head_parameters == config["vocab_size"] * hidden
    assert shape.attention_operations == 4 * layers * queries
    assert shape.max_tokens == config["max_position_embeddings"]


def test_a_shape_from_a_config_of_transformers(tmp_path):
    config = TRANSFORMERS["gpt_bigcode"]()  # four heads that share one KV head
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    shape = find_model(str(tmp_path))
    assert shape.kv_layout == KVLayout((LayerKV(1, 16, 16),) * 4, torch.bfloat16)
    assert shape.attention_operations == 4 * 4 * 64
    # Queries and output, one K and V, an MLP of four times the width; then the positions.
    assert shape.body_parameters == 4 * (2 * 64 * 64 + 64 * 32 + 2 * 64 * 256) + MAX_TOKENS * 64
    assert shape.head_parameters == VOCAB_SIZE * 64


def test_the_bundled_model_by_its_name() -> None:
    assert find_model("demo") == find_model(str(BUNDLED_MODELS["demo"]))


def test_unknown_names():
    with pytest.raises(ConfigError, match="nor one of demo, opt-13b"):
        find_model("opt-14b")
    for name in ("b100", "0xh200", "xh200"):
        with pytest.raises(ConfigError, match=f"--device '{name}' is unknown"):
            find_device(name)


def test_several_devices():
    assert find_device("h200") is DEVICES["h200"]
    four = find_device("4xa100-40g")
    assert four.memory_bytes == 4 * A100.memory_bytes
    work = StepWork(8, 8, 1000)
    alone, together = (StepModel(OPT, device).seconds(work) for device in (A100, four))
    assert together - four.overhead_s == pytest.approx((alone - A100.overhead_s) / 4)


def test_step_times():
    device = replace(A100, overhead_s=0.5, memory_efficiency=0.5, compute_efficiency=0.25)
    steps = StepModel(OPT, device)
    bandwidth, rate = 0.5 * device.bandwidth, 0.25 * device.operations_per_s
    weights_s = OPT.read_bytes / bandwidth
    kv_s = 100 * OPT.kv_layout.token_bytes / bandwidth
    # A step of few tokens is bound by reading weights, one of many by matrix products.
    assert steps.seconds(StepWork(2, 2, 100)) == pytest.approx(0.5 + weights_s + kv_s)
    operations = 2 * (4000 * OPT.body_parameters + 2 * OPT.head_parameters)
    assert steps.seconds(StepWork(4000, 2, 100)) == pytest.approx(0.5 + operations / rate + kv_s)
    # Attention of a chunk is bound by its operations, or by the KV that it reads.
    plain = steps.seconds(StepWork(300, 1, 0))
    pairs_s = 45_000 * OPT.attention_operations / rate
    assert steps.seconds(StepWork(300, 1, 0, 300, 45_000)) == pytest.approx(plain + pairs_s)
    read_s = 10**6 * OPT.kv_layout.token_bytes / bandwidth
    assert steps.seconds(StepWork(300, 1, 0, 10**6, 1)) == pytest.approx(plain + read_s)
    copies_s = 2 * 10**9 / bandwidth + 10**9 / device.link_bandwidth
    moving = StepWork(300, 1, 0, copied_bytes=10**9, moved_bytes=10**9)
    assert steps.seconds(moving) == pytest.approx(plain + copies_s)


def test_many_decode_steps_are_the_same_as_one_by_one():
    steps = StepModel(OPT, A100)
    kv_tokens = np.array([1, 77, 12345])
    assert steps.decode_seconds(9, kv_tokens).tolist() == [
        steps.seconds(StepWork(9, 9, n)) for n in kv_tokens.tolist()
    ]


def test_memory_without_backing():
    driver = ModelledDriver(5 * PAGE_BYTES)
    pool = PagePool(driver, 4 * PAGE_BYTES)
    owner = Owner("m", Kind.KV)
    window = VirtualRange(pool.pages, 64 << 40, PAGE_BYTES)
    tensor = window.tensor((1 << 40,), torch.float16, offset_bytes=PAGE_BYTES)
    assert (tensor.device.type, tensor.shape) == ("meta", (1 << 40,))
    pages = pool.acquire(owner, 3)
    assert pages is not None
    window.map(7, pages)
    assert driver.available_bytes() == 2 * PAGE_BYTES
    assert pool.acquire(owner, 2) is None
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        driver.create(PAGE_BYTES, 3)
    with pytest.raises(DriverError, match="a page is mapped"):
        pool.pages.map(window.address + 9 * PAGE_BYTES, pages[:1])
    with pytest.raises(DriverError, match="no page is mapped"):
        driver.unmap(window.address, PAGE_BYTES, 1)
    with pytest.raises(DriverError, match="no page is mapped"):
        driver.unmap(window.address + 9 * PAGE_BYTES, PAGE_BYTES, 2)
    end = window.address + window.num_bytes
    for address in (0, end - PAGE_BYTES, end, window.address + 1):
        with pytest.raises(DriverError, match="are not reserved"):
            pool.pages.map(address, pages[:2])
    pool.release(window.unmap(sorted(window.pages)))
    pool.close()
    assert driver.available_bytes() == 5 * PAGE_BYTES
    second = VirtualRange(pool.pages, PAGE_BYTES, PAGE_BYTES)
    window.close()
    with pytest.raises(DriverError, match="are not reserved"):
        driver.unmap(window.address + 7 * PAGE_BYTES, PAGE_BYTES, 1)
    with pytest.raises(DriverError, match="no page is mapped"):
        driver.unmap(second.address, PAGE_BYTES, 1)
