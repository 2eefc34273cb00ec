"""The engine with contiguous regions by forecast lengths: the same tokens; nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import OUR_DECODER, VOCAB_SIZE, save_tiny

from aquifer.bench.soak import check_idle
from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.outputs import RequestOutput
from aquifer.engine.params import BeamSearchParams, SamplingParams
from aquifer.errors import ConfigError
from aquifer.llm import LLM

OPTIONS: dict[str, Any] = {
    "page_size": "4KiB",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "max_model_len": 96,
    "seed": 0,
}
LENGTHS = (3, 5, 30, 4, 6, 41, 5, 3, 17, 4)
"""Tokens of the outputs: most are short, so that the others outgrow their regions."""


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; the second one has windows."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(OUR_DECODER[request.param](), folder, 2)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(folder, memory="16MiB", kv_cache="paged", **OPTIONS) as llm:
        return generate(llm)


def generate(llm: LLM) -> list[list[int]]:
    """Outputs of 40 requests. They end by a token that is forbidden until then and forced
    afterwards, so that nobody knows their lengths beforehand."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(VOCAB_SIZE, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 40, (40,), generator=generator)
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
        for number in range(len(prompts))
    ]
    return tokens(llm.generate(prompts, params, use_tqdm=False))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def cache_of(llm: LLM) -> BucketedCache:
    (lane,) = llm.engine.lanes.values()
    assert isinstance(lane.cache, BucketedCache)
    assert lane.prefixes is None
    return lane.cache


@pytest.mark.parametrize("length_prediction", ["off", "prior", "oracle"])
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_the_same_tokens(
    folder: Path,
    expected: list[list[int]],
    preemption_mode: str,
    length_prediction: str,
) -> None:
    """In room for three of the longest requests, so that many are preempted or moved."""
    assert {len(each) for each in expected} == {length + 1 for length in LENGTHS}
    with LLM(folder, memory="64MiB", kv_cache="bucketed", **OPTIONS) as llm:
        (info,) = llm.engine.models.values()
        num_pages = cache_of(llm).footprint.most(90, 96)
    with LLM(
        folder,
        memory=info.weight_bytes + 3 * num_pages * 4096,
        kv_cache="bucketed",
        preemption_mode=preemption_mode,
        length_prediction=length_prediction,
        **OPTIONS,
    ) as llm:
        cache = cache_of(llm)
        for _ in range(2):
            assert generate(llm) == expected
            cache.check()
        if length_prediction == "prior":
            assert cache.num_overflows > 0
            assert len(cache.bounds.bounds) > 2
        else:
            assert cache.num_overflows == 0
        check_idle(llm)


def test_beams_and_samples(folder: Path) -> None:
    prompt = [1, 2, 3, 4, 5]
    found = []
    for kv_cache in ("paged", "bucketed"):
        with LLM(folder, memory="16MiB", kv_cache=kv_cache, **OPTIONS) as llm:
            beams = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=12))
            several = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
            (output,) = llm.generate([prompt], several, use_tqdm=False)
            found.append(
                (
                    [list(completion.token_ids) for completion in beams[0].outputs],
                    [list(completion.token_ids) for completion in output.outputs],
                )
            )
            check_idle(llm)
    assert found[0] == found[1]


def test_layer_major_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="bucketed keeps whole tokens together"):
        LLM(folder, memory="16MiB", kv_cache="bucketed", kv_layout="layer-major", **OPTIONS)
