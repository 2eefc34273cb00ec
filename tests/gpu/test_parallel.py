"""Models that are split over two GPUs, with captured steps, make the tokens of one GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.gpu.test_engine import SEED, open_llm
from tests.gpu.test_sampling import METHODS, MIXTURES, OPTIONS, sampled

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.leader import start_ranks
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import GroupError
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


def test_sampling_of_two_gpus_equals_that_of_one(tmp_path: Path) -> None:
    """By temperature alone from each rank's logits, all else from joined ones; captured or not."""
    save_tiny(OUR_DECODER["llama"](), tmp_path, SEED)
    found = []
    for size in (1, 2):
        with open_llm(tmp_path, dtype="float32", tensor_parallel_size=size, **OPTIONS) as llm:
            # Also those that the host does not change, which are sampled in captured steps.
            mixtures = [*MIXTURES.values(), *([f"{name}-0"] * 5 for name in METHODS)]
            found.append([sampled(llm, names) for names in mixtures])
            assert llm.engine.stats().num_late_compilations == 0
    assert found[0] == found[1]


def run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_rank_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    """Kernels of rank 0 that wait for what it would have sent end, and another group can start."""
    save_tiny(OUR_DECODER["llama"](), tmp_path, 2)
    config = EngineConfig(
        (ModelSpec("m", tmp_path),), device="cuda", tensor_parallel_size=2, memory_bytes=4 << 30
    )
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    for _ in range(2):
        ranks = start_ranks("cuda", 2)
        assert ranks.collectives.adds_itself(torch.zeros(1, 64, device="cuda:0"))
        engine = Engine.open(config, ranks=ranks)
        engine.add(Request("r", "m", [5, 6, 7], params, 0.0))
        for _ in range(20):
            engine.step()
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        with pytest.raises(GroupError, match="died with exit code -9"):
            run_out(engine)
        engine.close()
        ranks.close()
