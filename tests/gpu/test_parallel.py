"""Models that are split over two GPUs, with captured steps, make the tokens of one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, VOCAB_SIZE, save_tiny

from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

NAMES = ("llama", "gemma2", "qwen3_moe", "deepseek_v2", "gpt_oss", "bamba", "qwen3_next")

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("kv_cache", ["virtual", "paged"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_two_gpus_equal_those_of_one(name: str, kv_cache: str, tmp_path: Path) -> None:
    """In float32, greedy and sampled; prompts in chunks beside sequences that decode."""
    save_tiny((OUR_DECODER | HYBRIDS)[name](), tmp_path, 2)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 12, 33, 70)
    ]
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3, "logprobs": 2},
    ]
    found = []
    for size in (1, 2):
        with LLM(
            tmp_path,
            device="cuda",
            tensor_parallel_size=size,
            kv_cache=kv_cache,
            memory="4GiB",
            max_num_batched_tokens=64,
        ) as llm:
            found.append(
                [
                    output.outputs[0].token_ids
                    for each in options
                    for output in llm.generate(
                        prompts,
                        SamplingParams(max_tokens=24, ignore_eos=True, **each),
                        use_tqdm=False,
                    )
                ]
            )
    assert found[0] == found[1]
