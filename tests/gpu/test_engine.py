"""The engine on a GPU gives the tokens of Transformers on the same GPU.

Two programs that round differently may choose different tokens where two are nearly equally good,
and everything after that is another text. So Transformers is run over our own tokens, and each of
them has to be its best one at that place, or behind that by no more than rounding explains.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.architectures import HYBRIDS, OUR_DECODER, TRANSFORMERS, save_tiny

from aquifer.cache import KV_CACHES
from aquifer.engine.chunk_graphs import ChunkGraphs
from aquifer.engine.graphs import ChunkStep
from aquifer.engine.outputs import RequestOutput, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.whole_graphs import WholeGraphs
from aquifer.llm import LLM
from aquifer.memory.pool import Kind, Owner

DEVICE = "cuda"
MEMORY = "16GiB"
SEED = 2
FLOAT32_ROUNDING = 1e-3
"""Far more than what the order of additions changes in logits of about 4, far less than the usual
distance of the best two."""

Tokens = list[list[int]]


# --- the reference: Transformers ------------------------------------------------------------------


def load(folder: Path, dtype: torch.dtype, compute_dtype: torch.dtype | None = None) -> Any:
    """Transformers' model with its weights rounded to `dtype`, computing in `compute_dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.to(DEVICE, compute_dtype or dtype).eval()


@torch.no_grad()
def output_logits(model: Any, prompts: Tokens, outputs: Tokens) -> list[torch.Tensor]:
    """The logits of each output token, [output tokens, vocab] in float32."""
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    result = []
    for first in range(0, len(texts), 8):
        batch = texts[first : first + 8]
        # Attention is causal, so padding at the end needs no mask.
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        for row, text in enumerate(batch):
            ids[row, : len(text)] = torch.tensor(text)
        logits = model(ids.to(DEVICE), use_cache=False).logits
        for row, text in enumerate(batch):
            start = len(prompts[first + row]) - 1
            result.append(logits[row, start : len(text) - 1].float())
    return result


def distances(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The logit of the best token minus that of each output token, [tokens]."""
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    best: torch.Tensor = logits.max(-1, keepdim=True).values
    return (best - logits.gather(1, chosen))[:, 0]


def assert_best(model: Any, prompts: Tokens, outputs: Tokens) -> None:
    """Check for float32: each token is the best one, except for ties."""
    for logits, tokens in zip(output_logits(model, prompts, outputs), outputs, strict=True):
        assert distances(logits, tokens).max() < FLOAT32_ROUNDING


def assert_best_within_rounding(
    folder: Path, prompts: Tokens, outputs: Tokens, most_rounding: float = 0.1
) -> None:
    """Check for bfloat16: each token is the best one, or rounding may have made it so.

    What rounding does is measured: by how much Transformers' own logits are off in bfloat16, at
    most. No token of ours may be behind by more. And most have to be what Transformers chooses,
    with or without rounding, so that a model that rounds badly does not excuse everything.
    `most_rounding` bounds what is measured, as a part of the largest logit.
    """
    exact = output_logits(load(folder, torch.bfloat16, torch.float32), prompts, outputs)
    rounded = output_logits(load(folder, torch.bfloat16), prompts, outputs)
    rounding = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    assert rounding < most_rounding * max(float(logits.abs().max()) for logits in exact)
    num_equal = 0
    for ours, right, theirs in zip(outputs, exact, rounded, strict=True):
        assert distances(right, ours).max() <= rounding
        equal = (distances(right, ours) == 0) | (distances(theirs, ours) == 0)
        num_equal += int(equal.sum())
    assert num_equal >= 0.8 * sum(map(len, outputs))


# --- ours ------------------------------------------------------------------------------------


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device=DEVICE, **{"memory": MEMORY, **options})


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, **params}, temperature=0, max_tokens=max_tokens)


def complete(
    llm: LLM, prompts: Tokens, params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Outputs of `llm`; checks that only retained prefixes are left afterwards."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_nothing_left(llm)
    return outputs


def generate(
    llm: LLM, prompts: Tokens, params: SamplingParams | Sequence[SamplingParams]
) -> Tokens:
    return [out.outputs[0].token_ids for out in complete(llm, prompts, params)]


def assert_nothing_left(llm: LLM) -> None:
    assert not llm.engine.has_work
    llm.engine.pool.check()
    in_use = llm.engine.pool.usage().in_use_bytes
    kinds = {owner.kind for owner, num_bytes in in_use.items() if num_bytes}
    assert kinds <= {Kind.WEIGHTS, Kind.OVERHEAD, Kind.PREFIX}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_on_two_gpus_of_one_process(tmp_path: Path) -> None:
    """They make the same tokens in turns, whichever GPU is the thread's current one."""
    save_tiny(OUR_DECODER["llama"](), tmp_path)
    prompts = [[5, 6, 7], [8] * 40]
    with (
        LLM(tmp_path, device="cuda:1", memory=MEMORY) as second,
        LLM(tmp_path, device="cuda:0", memory=MEMORY) as first,
    ):
        found = [generate(llm, prompts, greedy(12)) for llm in (second, first, second)]
    assert found[0] == found[1] == found[2]


def num_preemptions(llm: LLM) -> int:
    return sum(llm.engine.stats().num_preemptions.values())


def random_prompts(lengths: Sequence[int], vocab_size: int = 199) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Models of Transformers would count as the next engine's overhead."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- bfloat16 --------------------------------------------------------------------------------

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    **{name: OUR_DECODER[name] for name in ("llama", "qwen3", "mistral")},
    **{name: OUR_DECODER[name] for name in ("gemma2", "gemma3_text", "phi", "olmo2", "cohere2")},
    **{name: OUR_DECODER[name] for name in ("gpt2", "gpt_neox", "opt", "glm4", "stablelm")},
    "bloom": OUR_DECODER["bloom"],
    "gpt_oss": lambda: with_all_experts("gpt_oss"),
    "gpt_oss-no-biases": lambda: with_all_experts("gpt_oss-no-biases"),
    **{name: TRANSFORMERS[name] for name in ("gpt_bigcode", "helium", "nemotron")},
    "falcon_h1": HYBRIDS["falcon_h1"],
    "deepseek_v2": lambda: latent(transformers.DeepseekV2Config, 16, q_lora_rank=None),
    "deepseek_v3": lambda: latent(
        transformers.DeepseekV3Config, 128, q_lora_rank=96, n_group=2, topk_group=2
    ),
}


def with_all_experts(name: str) -> Any:
    """A tiny model of which each token has all experts: where the best ones are chosen, rounding
    changes which they are."""
    config = OUR_DECODER[name]()
    config.num_experts_per_tok = config.num_local_experts
    return config


def latent(kind: Any, num_heads: int, **fields: Any) -> Any:
    """A model with the attention of DeepSeek-V2-Lite, or of V3: the sizes that kernels are for.

    Each token has all experts, see `with_all_experts`.
    """
    sizes = {
        "vocab_size": 199,
        "hidden_size": 128,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "pad_token_id": 0,
    }
    return kind(**{**sizes, **fields})


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_long_prompts_of_latent_attention(kv_cache: str, tmp_path: Path) -> None:
    """Whole prompts are expanded where a step is not captured, as one with log probabilities of its
    prompt; others are not, nor are prompts of which a part is cached."""
    config = latent(
        transformers.DeepseekV2Config, 16, q_lora_rank=None, max_position_embeddings=2048
    )
    save_tiny(config, tmp_path, SEED)
    prompts = random_prompts((600, 513, 700))
    params = [greedy(12, prompt_logprobs=1), greedy(12)]
    with open_llm(tmp_path, dtype="float32", kv_cache=kv_cache) as llm:
        results = [generate(llm, prompts, each) for each in (*params, params[1])]
    model = load(tmp_path, torch.float32)
    for outputs in results:
        assert_best(model, prompts, outputs)


@pytest.mark.parametrize(
    ("kv_cache", "max_num_batched_tokens"), [("virtual", None), ("virtual", 16), ("paged", 16)]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16(
    architecture: str, kv_cache: str, max_num_batched_tokens: int | None, tmp_path: Path
) -> None:
    save_tiny(ARCHITECTURES[architecture](), tmp_path, SEED)
    prompts = random_prompts((1, 12, 33, 70, 5))
    options: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens}
    with open_llm(tmp_path, dtype="bfloat16", kv_cache=kv_cache, **options) as llm:
        outputs = generate(llm, prompts, [greedy(n) for n in (40, 24, 8, 30, 1)])
        alone = [generate(llm, [prompt], greedy(24))[0] for prompt in prompts[:2]]
    # What Transformers computes for Falcon-H1 in 16 bits is off by up to 0.15 of it on a CPU, too.
    most = 0.25 if architecture == "falcon_h1" else 0.1
    assert_best_within_rounding(tmp_path, prompts, outputs, most)
    assert_best_within_rounding(tmp_path, prompts[:2], alone, most)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_hybrids_give_the_tokens_of_the_host(
    architecture: str, kv_cache: str, tmp_path: Path
) -> None:
    """In float32, where tests/engine/test_tokens.py compares the host with Transformers."""
    save_tiny(HYBRIDS[architecture](), tmp_path, SEED)
    prompts, params = random_prompts((1, 12, 33, 70, 5)), [greedy(n) for n in (40, 24, 8, 30, 1)]
    with LLM(tmp_path, device="cpu", memory="64MiB", dtype="float32") as llm:
        expected = generate(llm, prompts, params)
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "kv_cache": kv_cache}
    with open_llm(tmp_path, dtype="float32", **options) as llm:
        assert generate(llm, prompts, params) == expected


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 100 million parameters in the shape of real ones: whole tiles, several of each."""
    folder = tmp_path_factory.mktemp("llama-100m")
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_bfloat16_of_a_larger_model(mid_size: Path, kv_cache: str) -> None:
    """Many sequences of all lengths, prompts in chunks beside sequences that decode."""
    lengths = [1, 700, 16, 17, 640, 511, 512, 513, *range(20, 500, 15)]
    prompts = random_prompts(lengths, 32000)
    params = [greedy(8 + i * 7 % 57) for i in range(len(prompts))]
    with open_llm(mid_size, kv_cache=kv_cache, max_num_batched_tokens=1024) as llm:
        outputs = generate(llm, prompts, params)
    assert_best_within_rounding(mid_size, prompts, outputs)


# --- float32, with the same tokens in any batch ------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    model: Any  # Transformers'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(OUR_DECODER["llama"](), folder, SEED)
    return Checkpoint(folder, load(folder, torch.float32))


@pytest.fixture(scope="module", params=KV_CACHES)
def llm(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[LLM]:
    with open_llm(checkpoint.folder, kv_cache=request.param) as llm:
        yield llm


def test_caches_and_chunks_give_the_same_tokens(checkpoint: Checkpoint) -> None:
    prompts = random_prompts((1, 12, 33, 70, 5))
    results = []
    for kv_cache in KV_CACHES:
        for max_num_batched_tokens in (7, None):
            options: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens}
            with open_llm(checkpoint.folder, kv_cache=kv_cache, **options) as llm:
                results.append(generate(llm, prompts, greedy(24)))
    assert_best(checkpoint.model, prompts, results[0])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek_v2"])
def test_short_prompts_are_read_in_one_graph(
    architecture: str, kv_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside sequences that decode, and after a prefix; with the tokens of steps in pieces."""
    save_tiny(OUR_DECODER[architecture](), tmp_path, SEED)
    prompts = random_prompts((1, 12, 33, 70, 5, 60, 41))
    params = [greedy(n) for n in (40, 24, 8, 30, 1, 12, 20)]
    whole, pieces = [], []
    run, run_pieces = WholeGraphs.run, ChunkGraphs.run

    def noted(self: WholeGraphs, size: int, step: ChunkStep) -> None:
        whole.append((step.num_decodes, step.spans.starts[step.num_decodes :].tolist()))
        run(self, size, step)

    def noted_pieces(self: ChunkGraphs, *arguments: Any) -> None:
        pieces.append(arguments[0])
        run_pieces(self, *arguments)

    monkeypatch.setattr(WholeGraphs, "run", noted)
    monkeypatch.setattr(ChunkGraphs, "run", noted_pieces)
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "dtype": "float32"}
    with open_llm(tmp_path, kv_cache=kv_cache, **options) as llm:
        outputs = generate(llm, prompts, params)
        assert any(num_decodes and max(starts) for num_decodes, starts in whole)
        assert not pieces
        monkeypatch.setattr(WholeGraphs, "size_of", lambda *arguments: None)
        in_pieces = generate(llm, prompts, params)
        assert pieces
    assert_best(load(tmp_path, torch.float32), prompts, outputs)
    assert in_pieces == outputs


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("architecture", ["gpt_oss", "gpt_oss-no-biases", "qwen3_moe", "mpt"])
def test_float32(architecture: str, kv_cache: str, tmp_path: Path) -> None:
    """Families whose tokens have some of the experts, and ALiBi."""
    save_tiny(OUR_DECODER[architecture](), tmp_path, SEED)
    prompts = random_prompts((1, 12, 33, 70, 5))
    options: dict[str, Any] = {"max_num_batched_tokens": 16}
    with open_llm(tmp_path, dtype="float32", kv_cache=kv_cache, **options) as llm:
        outputs = generate(llm, prompts, [greedy(n) for n in (40, 24, 8, 30, 1)])
    assert_best(load(tmp_path, torch.float32), prompts, outputs)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_longrope(kv_cache: str, tmp_path: Path) -> None:
    """Sequences outgrow the original length of the rotary embedding while others run."""
    save_tiny(OUR_DECODER["phi3-longrope"](), tmp_path, SEED)
    prompts = random_prompts((1, 12, 31, 32, 33, 70))
    options: dict[str, Any] = {"max_num_batched_tokens": 16}
    with open_llm(tmp_path, dtype="float32", kv_cache=kv_cache, **options) as llm:
        outputs = generate(llm, prompts, greedy(40))
    model = load(tmp_path, torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        # Each token is chosen from KV of the length that its sequence had then.
        for count, token in enumerate(output):
            ids = torch.tensor([prompt + output[:count]], device=DEVICE)
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, -1:]
            assert distances(logits, [token]).max() < FLOAT32_ROUNDING


def test_the_batch_grows_and_shrinks(llm: LLM, checkpoint: Checkpoint) -> None:
    """From 70 sequences down to one, over all padded sizes between, and up again."""
    prompts = random_prompts([1 + i * 13 % 60 for i in range(70)])
    outputs = generate(llm, prompts, [greedy(2 + i * 31 % 64) for i in range(len(prompts))])
    assert_best(checkpoint.model, prompts, outputs)

    engine = llm.engine
    (model,) = engine.models
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    waiting = [(f"late-{i}", prompt) for i, prompt in enumerate(prompts[:24])]
    while engine.has_work or waiting:
        if waiting:  # one more in each step
            name, prompt = waiting.pop(0)
            engine.add(Request(name, model, prompt, greedy(30), time.monotonic()))
        collect(engine.step(), tokens)
    assert_nothing_left(llm)
    assert_best(checkpoint.model, prompts[:24], [tokens[f"late-{i}"] for i in range(24)])


def test_a_closed_engine_leaves_nothing(checkpoint: Checkpoint) -> None:
    """After an engine is closed, all its device memory is free, that of graphs too."""
    left_bytes = []
    for _ in range(3):
        with open_llm(checkpoint.folder) as llm:
            generate(llm, random_prompts((5, 9, 70)), greedy(8))
            open_bytes = torch.cuda.memory_reserved()
        assert torch.cuda.memory_reserved() < open_bytes
        del llm  # it has small buffers, as long as it is referred to
        gc.collect()
        left_bytes.append(torch.cuda.memory_allocated())
    assert left_bytes[0] == left_bytes[1] == left_bytes[2]


def collect(outputs: list[TokenOutput], tokens: dict[str, list[int]]) -> None:
    for output in outputs:
        assert output.error is None
        tokens[output.request_id] += output.token_ids


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_preemption(kv_cache: str, tmp_path: Path) -> None:
    """Sequences of up to 36 MB where 150 MB are free: most are preempted and come back."""
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=512,
    )
    save_tiny(config, tmp_path, SEED)
    prompts = random_prompts([40 + i * 17 % 60 for i in range(12)])
    params = [greedy(120 + i * 29 % 80) for i in range(len(prompts))]
    with open_llm(tmp_path, kv_cache=kv_cache, enable_prefix_caching=False) as llm:
        generate(llm, prompts, params)  # all graphs are captured now, so that the overhead stays
        assert num_preemptions(llm) == 0
        pool = llm.engine.pool
        pool.account_overhead(pool.driver.overhead_bytes())
        count = (pool.free_bytes - (150 << 20)) // pool.page_bytes
        ballast = pool.acquire(Owner("others", Kind.PREFIX), count)
        assert ballast is not None
        outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert num_preemptions(llm) > 0
        pool.release(ballast)
        assert_nothing_left(llm)
    assert_best(load(tmp_path, torch.float32), prompts, outputs)


def test_a_seed_gives_the_same_tokens_in_any_batch(checkpoint: Checkpoint) -> None:
    prompts = random_prompts((20, 5, 30, 12, 1))
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(seed=123, top_p=0.95, presence_penalty=0.5, logprobs=1, **common),
        SamplingParams(seed=-5, top_k=40, temperature=1.3, prompt_logprobs=1, **common),
        *[SamplingParams(seed=s, **common) for s in (2**64 - 1, 0, 123)],
    ]
    company = random_prompts([3 + i for i in range(40)])
    results = []
    for kv_cache in KV_CACHES:
        with open_llm(checkpoint.folder, kv_cache=kv_cache, max_num_batched_tokens=64) as llm:
            results.append([generate(llm, [p], q)[0] for p, q in zip(prompts, params, strict=True)])
            results.append(generate(llm, prompts, params))
            others = [SamplingParams(min_p=0.01, **common)] * len(company)
            together = generate(llm, company + prompts, others + params)
            results.append(together[len(company) :])
    assert all(result == results[0] for result in results)
    assert results[0][0] != results[0][4]


# --- what requests may ask for, with steps in flight -------------------------------------------


def test_stop_tokens(llm: LLM) -> None:
    """The step after the one that brings a stop token is in flight when the host sees it."""
    (prompt,) = random_prompts([9])
    (tokens,) = generate(llm, [prompt], greedy(24))
    stop = tokens[5]
    first = tokens.index(stop)
    others = random_prompts([5, 40])
    wanted = [greedy(24, stop_token_ids=[stop]), greedy(30), greedy(12)]
    (completion,) = complete(llm, [prompt, *others], wanted)[0].outputs
    assert completion.token_ids == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    late = greedy(24, stop_token_ids=[stop], min_tokens=first + 4)
    (completion,) = complete(llm, [prompt], late)[0].outputs
    assert completion.token_ids[:first] == tokens[:first]
    assert stop not in completion.token_ids[: first + 4]
    allowed = SamplingParams(allowed_token_ids=[7, 8, 9], seed=0, max_tokens=40)
    (drawn,) = generate(llm, [prompt], allowed)
    assert set(drawn) == {7, 8, 9}
    assert len(drawn) == 40


def test_logprobs(llm: LLM, checkpoint: Checkpoint) -> None:
    prompts = random_prompts((1, 9, 40))
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=12, logprobs=n, prompt_logprobs=m)
        for t, n, m in ((0.0, 0, 3), (1.0, 5, 0), (2.0, 20, 20))
    ]
    for out, wanted in zip(complete(llm, prompts, params), params, strict=True):
        (completion,) = out.outputs
        ids = [*out.prompt_token_ids, *completion.token_ids]
        (logits,) = output_logits(checkpoint.model, [ids[:1]], [ids[1:]])
        reference = logits.log_softmax(-1)  # [tokens - 1, vocab]
        assert out.prompt_logprobs is not None
        assert completion.logprobs is not None
        entries = [*out.prompt_logprobs[1:], *completion.logprobs]
        assert len(entries) == len(ids) - 1
        for position, entry in enumerate(entries):
            row, chosen = reference[position], ids[position + 1]
            is_prompt = position + 1 < len(out.prompt_token_ids)
            count = wanted.prompt_logprobs if is_prompt else wanted.logprobs
            assert count is not None
            assert entry is not None
            assert chosen in entry
            assert count <= len(entry) <= count + 1
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)
                better = row > row[token] + FLOAT32_ROUNDING
                as_good = row > row[token] - FLOAT32_ROUNDING
                assert int(better.sum()) < logprob.rank <= int(as_good.sum())


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.4, 0.0, 0.0), (1.0, 0.7, 0.4), (1.2, -0.5, 0.3)]
)
def test_penalties(
    llm: LLM, checkpoint: Checkpoint, repetition: float, presence: float, frequency: float
) -> None:
    prompts = random_prompts((9, 50))
    params = greedy(
        40,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    outputs = generate(llm, prompts, params)
    for prompt, output, logits in zip(
        prompts, outputs, output_logits(checkpoint.model, prompts, outputs), strict=True
    ):
        for i, row in enumerate(logits):
            seen = list({*prompt, *output[:i]})
            row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
            for token in set(output[:i]):
                row[token] -= presence + frequency * output[:i].count(token)
        assert distances(logits, output).max() < FLOAT32_ROUNDING


def test_abort_while_in_flight(llm: LLM, checkpoint: Checkpoint) -> None:
    """Aborted requests give no more output; requests that reuse their slots and pages are right."""
    engine = llm.engine
    (model,) = engine.models
    prompts = random_prompts((30, 8, 25, 60, 12, 40, 3))
    tokens: defaultdict[str, list[int]] = defaultdict(list)

    def add(i: int) -> None:
        engine.add(Request(f"a-{i}", model, prompts[i], greedy(40), time.monotonic()))

    for i in range(5):
        add(i)
    for _ in range(9):
        collect(engine.step(), tokens)
    aborted = {name: list(tokens[name]) for name in ("a-1", "a-3")}
    for name in aborted:
        engine.abort(name)
    add(5)
    add(6)
    collect(engine.step(), tokens)
    engine.abort("a-6")  # its prompt is in flight
    while engine.has_work:
        collect(engine.step(), tokens)
    assert {name: tokens[name] for name in aborted} == aborted
    assert not tokens["a-6"]
    whole = (0, 2, 4, 5)
    assert [len(tokens[f"a-{i}"]) for i in whole] == [40] * len(whole)
    assert_best(checkpoint.model, [prompts[i] for i in whole], [tokens[f"a-{i}"] for i in whole])
    assert_nothing_left(llm)
