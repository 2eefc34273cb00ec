"""The engine with forecasts of lengths: the same tokens (tests/sim/test_prediction.py has more)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import OUR_DECODER, VOCAB_SIZE, save_tiny

from aquifer.bench.soak import check_idle
from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.lane import Lane
from aquifer.engine.params import SamplingParams
from aquifer.errors import ConfigError
from aquifer.llm import LLM
from aquifer.predict.model import LengthPredictor, PredictorConfig

OPTIONS: dict[str, Any] = {
    "page_size": "4KiB",
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 16,
    "max_model_len": 96,
    "enable_prefix_caching": False,
    "seed": 0,
}
LENGTHS = (3, 5, 30, 4, 6, 41, 5, 3, 17, 4)
"""Tokens of the outputs before the last one."""

NUM_REQUESTS = len(LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny(OUR_DECODER["llama"](), folder, 2)
    return folder


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A predictor that was never trained, so that it says anything."""
    folder = tmp_path_factory.mktemp("predictor")
    torch.manual_seed(0)
    LengthPredictor(PredictorConfig("compact", "")).save(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(folder, memory="16MiB", kv_cache="paged", **OPTIONS) as llm:
        return generate(llm)


def generate(llm: LLM) -> list[list[int]]:
    """Outputs that end by a token that is forbidden until then and forced afterwards, so that
    their lengths are not known beforehand."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(VOCAB_SIZE, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 40, (NUM_REQUESTS,), generator=generator)
    ]
    last = VOCAB_SIZE - 1
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=50,
            min_tokens=LENGTHS[number % len(LENGTHS)],
            stop_token_ids=[last],
            logit_bias={last: 100.0},
            ignore_eos=True,
        )
        for number in range(NUM_REQUESTS)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def lane_of(llm: LLM) -> Lane:
    (lane,) = llm.engine.lanes.values()
    return lane


def memory_bytes(folder: Path, kv_cache: str, num_requests: int) -> int:
    """Weights, and KV of some of the longest requests."""
    with LLM(folder, memory="64MiB", kv_cache=kv_cache, **OPTIONS) as llm:
        (info,) = llm.engine.models.values()
        num_pages = lane_of(llm).cache.footprint.most(45, 96)
        return info.weight_bytes + num_requests * num_pages * 4096


@pytest.mark.parametrize("kv_cache", ["virtual", "paged", "bucketed"])
@pytest.mark.parametrize("way", ["prior", "oracle", "predictor"])
def test_the_same_tokens(
    folder: Path, predictor: Path, expected: list[list[int]], kv_cache: str, way: str
) -> None:
    assert {len(each) for each in expected} == {length + 1 for length in LENGTHS}
    with LLM(
        folder,
        memory=memory_bytes(folder, kv_cache, 3),
        kv_cache=kv_cache,
        length_prediction=str(predictor) if way == "predictor" else way,
        bucket_routing_threshold=1.0 if kv_cache == "bucketed" else 0.75,
        **OPTIONS,
    ) as llm:
        for _ in range(2):
            assert generate(llm) == expected
        cache = lane_of(llm).cache
        if isinstance(cache, BucketedCache):
            cache.check()
            assert cache.num_overflows == 0 or way != "oracle"
        check_idle(llm)


def test_what_is_no_predictor_is_refused(folder: Path) -> None:
    for choice, message in ((str(folder), "holds no length predictor"), ("maybe", "choose off")):
        with pytest.raises(ConfigError, match=message):
            LLM(folder, memory="16MiB", length_prediction=choice, **OPTIONS)
