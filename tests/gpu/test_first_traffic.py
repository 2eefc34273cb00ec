"""After a model is loaded, no kernel is compiled: whatever the requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.architectures import OUR_DECODER, save_tiny

from aquifer.cache import KV_CACHES
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

PARAMS = (
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=7, ignore_eos=True, n=2),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, frequency_penalty=0.5, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3, ignore_eos=True),
)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_compiled_under_traffic(kv_cache: str, dtype: str, tmp_path: Path) -> None:
    config = OUR_DECODER["qwen3"]()
    config.max_position_embeddings = 6000
    save_tiny(config, tmp_path)
    llm = LLM(
        tmp_path,
        device="cuda",
        memory="16GiB",
        kv_cache=kv_cache,
        dtype=dtype,
        max_num_batched_tokens=4096,
        max_num_seqs=40,
    )
    generator = torch.Generator().manual_seed(0)

    def prompts(*lengths: int) -> list[list[int]]:
        return [torch.randint(199, (n,), generator=generator).tolist() for n in lengths]

    lengths = torch.randint(1, 700, (60,), generator=generator).tolist()
    for params in PARAMS:
        llm.generate(prompts(*lengths[:20]), params, use_tqdm=False)
        llm.generate(prompts(1), params, use_tqdm=False)
    mixed = [PARAMS[i % len(PARAMS)] for i in range(len(lengths))]
    llm.generate(prompts(*lengths), mixed, use_tqdm=False)
    # Round prompts, long ones, and the same again from the prefix cache.
    again = prompts(2048, 2048, 4096, 512, 1024, 5000, 5500)
    for _ in range(2):
        llm.generate(again, PARAMS[0], use_tqdm=False)
    assert llm.engine.stats().num_late_compilations == 0
