"""Weights on a GPU: from host memory and back under captured steps, and shared by fine-tunes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import VOCAB_SIZE, tiny_llama

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.memory.host_buffer import PIECE_BYTES, in_pieces, locked_buffer
from aquifer.weights.loader import copy_bytes

CONTEXT = 256
NAMES = ("base", "tuned", "other")
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Its matrices take a page of 2 MiB or more in bfloat16, so that each is shared by itself."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, one that differs from it in one tensor, and one of other weights."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: folder / name for name in NAMES}
    for name, seed in zip(NAMES, (1, 1, 2), strict=True):
        tiny_llama(found[name], seed=seed, **SHAPE)
    file = found["tuned"] / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.o_proj.weight"))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, file)
    return found


def config_of(folders: dict[str, Path], **options: Any) -> EngineConfig:
    return EngineConfig(
        tuple(ModelSpec(name, folder) for name, folder in folders.items()),
        device="cuda",
        memory_bytes=8 << 30,
        max_model_len=CONTEXT,
        host_cache_bytes=1 << 30,
        enable_prefix_caching=False,
        **options,
    )


@pytest.fixture
def engine(folders: dict[str, Path]) -> Iterator[Engine]:
    config = config_of(folders, dtype="bfloat16", max_num_seqs=8)
    with closing(Engine.open(config)) as engine:
        yield engine


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
METHODS: list[dict[str, Any]] = [
    {},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0, "logit_bias": {5: 3.0}},
    {"allowed_token_ids": list(range(0, VOCAB_SIZE, 3))},
]


def answers(
    engine: Engine,
    model: str,
    lengths: Sequence[int] = (20, 21, 22, 23),
    params: Sequence[SamplingParams] = (GREEDY,),
) -> list[list[int]]:
    """Tokens of prompts that run together, with `params` in turn: captured steps decode them."""
    random, tokens = Random(3), {}
    for number, length in enumerate(lengths):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(length)]
        each = params[number % len(params)]
        engine.add(Request(str(number), model, prompt, each, time.monotonic()))
        tokens[str(number)] = list[int]()
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


def wait_until_saved(engine: Engine) -> None:
    while any(status.is_saving for status in engine.statuses.values()):
        time.sleep(0.01)


def test_weights_come_back_from_host_memory(engine: Engine, folders: dict[str, Path]):
    """Whole or half, again and again, with the steps that were captured before."""
    wait_until_saved(engine)
    for status in engine.statuses.values():
        assert status.host_bytes == status.weight_bytes
    expected = {name: answers(engine, name) for name in folders}
    assert len({str(found) for found in expected.values()}) == len(folders)
    random = Random(1)
    for _ in range(12):
        name = random.choice(NAMES)
        engine.unload_model(name, random.choice((0, engine.models[name].weight_bytes // 2)))
        for each in random.sample(NAMES, 2):
            assert answers(engine, each) == expected[each]
        engine.pool.check()
    assert engine.stats().num_late_compilations == 0


def test_many_sampled_requests_after_weights_came_back(folders: dict[str, Path]) -> None:
    """Their prompts are longer than a chunk. In float32, as steps may differ in what runs."""
    lengths = [70 + number * 37 % 150 for number in range(24)]
    params = [SamplingParams(seed=9, max_tokens=24, ignore_eos=True, **each) for each in METHODS]
    two = {name: folders[name] for name in ("base", "other")}  # which share nothing
    config = config_of(two, dtype="float32", max_num_seqs=24, max_num_batched_tokens=64)
    with closing(Engine.open(config)) as engine:
        wait_until_saved(engine)
        expected = {name: answers(engine, name, lengths, params) for name in two}
        assert expected["base"] != expected["other"]
        for kept in (0.0, 0.5):
            for name in two:
                engine.unload_model(name, int(kept * engine.models[name].weight_bytes))
            for name in two:
                assert answers(engine, name, lengths, params) == expected[name]
        engine.pool.check()
        assert engine.stats().num_late_compilations == 0


def test_fine_tunes_share_pages(engine: Engine):
    status = engine.statuses["tuned"]
    assert engine.statuses["base"].shared_bytes + status.shared_bytes > status.weight_bytes // 2
    other = engine.statuses["other"]  # it has norms of ones, too
    assert other.shared_bytes < other.weight_bytes // 4


@pytest.mark.parametrize("num_bytes", [1, 4096, PIECE_BYTES, 2 * PIECE_BYTES + 17])
def test_page_locked_memory_is_given_back(num_bytes: int):
    buffer = locked_buffer(num_bytes, torch.device("cuda"))
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda")
    pairs = list(in_pieces(buffer.bytes, source))
    assert all(host.is_pinned() for host, _ in pairs)
    copy_bytes([(part, host) for host, part in pairs])
    back = torch.zeros_like(source)
    copy_bytes(list(in_pieces(buffer.bytes, back)))
    assert torch.equal(back, source)
    buffer.close()
