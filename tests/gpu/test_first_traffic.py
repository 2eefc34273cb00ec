"""After a model is loaded, no kernel is compiled: whatever the requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.architectures import OUR_DECODER, TRANSFORMERS, save_tiny
from tests.gpu.test_transformers import waiting_mlp
from transformers.models.nemotron.modeling_nemotron import NemotronMLP

from aquifer.cache import KV_CACHES
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

ARCHITECTURES = OUR_DECODER | TRANSFORMERS
PARAMS = (
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=7, ignore_eos=True, n=2),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, frequency_penalty=0.5, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={3: 2.0}, max_tokens=4, ignore_eos=True),
    SamplingParams(allowed_token_ids=[7, 8, 9], logit_bias={8: 1.0}, max_tokens=4, ignore_eos=True),
    SamplingParams(top_k=20, min_tokens=4, max_tokens=6, presence_penalty=0.5),
)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ["qwen3", "nemotron", "granitemoe", "not captured"])
def test_nothing_is_compiled_under_traffic(
    architecture: str, kv_cache: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_captured = architecture != "not captured"
    if not is_captured:
        architecture = "nemotron"
        monkeypatch.setattr(NemotronMLP, "forward", waiting_mlp)
    config = ARCHITECTURES[architecture]()
    config.max_position_embeddings = 6000
    save_tiny(config, tmp_path)
    generator = torch.Generator().manual_seed(0)

    def prompts(*lengths: int) -> list[list[int]]:
        return [torch.randint(199, (n,), generator=generator).tolist() for n in lengths]

    lengths = torch.randint(1, 700, (60,), generator=generator).tolist()
    with LLM(
        tmp_path,
        device="cuda",
        memory="16GiB",
        kv_cache=kv_cache,
        dtype=dtype,
        max_num_batched_tokens=4096,
        max_num_seqs=40,
    ) as llm:
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
        (lane,) = llm.engine.lanes.values()
        assert bool(lane.captured_sizes) == is_captured
