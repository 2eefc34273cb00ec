"""Greedy outputs equal those of Transformers, token for token: for every architecture, both KV
caches, several step sizes, and with too little memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import (
    HYBRIDS,
    MAX_TOKENS,
    OUR_DECODER,
    TRANSFORMERS,
    VOCAB_SIZE,
    other_shape,
    save_tiny,
)
from tests.cases import EVERY_CASE, covering

from aquifer.cache import spans
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM
from aquifer.memory.pool import Kind
from aquifer.models import plan_model
from aquifer.weights.checkpoint import Checkpoint

ARCHITECTURES = OUR_DECODER | HYBRIDS | TRANSFORMERS
PROMPT_TOKENS = (1, 12, 33, 70)
OUTPUT_TOKENS = 16
GROWING_TOKENS = 24  # of outputs that outgrow the pool
SEED, OTHER_SEED = 2, 5  # of the first shape, of the second
SEEDS = {"bamba-biases": 3}
"""Seeds of architectures of which another one leads to a tie."""
CLEAR_GAP = 1e-4
"""The least lead of the best logit; far more than what the order of additions changes."""

EVERYWHERE = ("qwen2-window", "gemma2", "qwen3_moe", "opt-350m-style", "deepseek_v2", "deepseek_v3")
"""The architectures that run with every size of steps and in both KV caches: our decoder, with
layers that have a window beside layers that have none, with soft caps, with experts, and with
latent KV; and a model of Transformers."""

_OTHER = "/other"
"""Ends the name of an architecture's second shape."""

STEPS = [("virtual", 11, 1), ("paged", 11, 1), ("paged", 1, 0), ("virtual", 1, 0)]
STEPS += [("virtual", 512, 0), ("paged", 512, 0)]
"""(KV cache, tokens per step, steps planned ahead); there is room for all sequences. In every other
one, all sizes of steps and both caches occur."""

LARGE_PAGES: Any = {"page_size": "4KiB", "prompt_page_size": "16KiB", "map_ahead": "background"}
"""Pages for what a prompt fills, and others that a thread maps ahead of need."""

PREEMPTIONS = [("paged", 1), ("virtual", 1), ("virtual", 0)]
"""(KV cache, steps planned ahead); the pool is too small."""


STEP_TURNS = (None, 0, 1, None, 1, 0)
"""Which of `STEPS` each of six architectures in a row runs in: prompts in chunks beside sequences
that decode, in either KV cache. Where it is None, the architecture does that under preemption."""

PREEMPTION_TURNS = (0, None, None, 1, None, None)
"""Likewise of `PREEMPTIONS`, for a third of the architectures: sequences that begin again. What
preemption moves depends on the kinds of layers, and all of these are in `EVERYWHERE` and among the
hybrid models."""


def cases(
    configurations: list[Any], turns: tuple[int | None, ...], parts: tuple[list[Any], ...]
) -> list[Any]:
    """The architectures of `EVERYWHERE` in turn in one of the parts of the configurations, and the
    others in turn in one configuration or none.

    The rest of what a configuration changes does not depend on the architecture. With `EVERY_CASE`,
    all run in all configurations, and architectures of our decoder have a second shape.
    """
    found: list[Any] = []
    parts_in_turn = dict(zip(EVERYWHERE, cycle(parts), strict=False))
    for architecture, turn in zip(ARCHITECTURES, cycle(turns), strict=False):
        used = [] if turn is None else [configurations[turn]]
        if EVERY_CASE or architecture in EVERYWHERE:
            used = configurations if EVERY_CASE else parts_in_turn[architecture]
        found += [(architecture, *configuration) for configuration in used]
        if EVERY_CASE and architecture in OUR_DECODER:
            found += [(architecture + _OTHER, *configuration) for configuration in configurations]
    return found


@dataclass(frozen=True)
class Reference:
    """A model, and what Transformers generates after each prompt alone.

    Attributes:
        outputs: those that are known, by the prompt's index and the number of tokens.
    """

    folder: Path
    prompts: list[list[int]]
    model: Any
    uses_cache: bool
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def output(self, index: int, num_tokens: int, guess: list[int]) -> list[int]:
        """What Transformers generates, that many tokens.

        One run of the model over the prompt and a guess tells whether that is the guess. If it is
        not, tokens are generated one by one.
        """
        key = index, num_tokens
        if key not in self.outputs:
            prompt = self.prompts[index]
            is_right = len(guess) == num_tokens and is_causal(self.model)
            if not is_right or not is_greedy(self.model, prompt, guess):
                guess = greedy(self.model, prompt, num_tokens, uses_cache=self.uses_cache)
            self.outputs[key] = guess
        return self.outputs[key]


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """The references so far, by architecture."""
    return {}


@pytest.fixture
def reference(
    request: pytest.FixtureRequest,
    references: dict[str, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    """Transformers' model of this architecture, made once for all tests."""
    found = references.get(request.param)
    if found is None:
        found = references[request.param] = save(
            request.param, tmp_path_factory.mktemp("reference")
        )
    return found


def save(architecture: str, folder: Path) -> Reference:
    """Save a model of this architecture."""
    name = architecture.removesuffix(_OTHER)
    if name == architecture:
        model = save_tiny(ARCHITECTURES[name](), folder, SEEDS.get(name, SEED))
    else:
        model = save_tiny(other_shape(name), folder, OTHER_SEED)
    longest = plan_model(Checkpoint.open(folder)).max_model_len
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(
            VOCAB_SIZE, (min(length, longest - GROWING_TOKENS),), generator=generator
        ).tolist()
        for length in PROMPT_TOKENS
    ]
    # With cached state, Transformers 5.23 leaves out the limits of Mamba-2's steps.
    return Reference(folder, prompts, model, uses_cache=name not in HYBRIDS)


def is_causal(model: Any) -> bool:
    """Whether logits do not depend on later tokens: some rotary scaling is that of the length."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    return rope.get("rope_type") not in ("dynamic", "longrope")


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether each token of an output has the best logit after those before it, by a clear lead."""
    ids = torch.tensor([prompt + output[:-1]])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    (best,), (tokens,) = logits[:, len(prompt) - 1 :].float().topk(2)
    return tokens[:, 0].tolist() == output and bool((best[:, 0] - best[:, 1]).min() > CLEAR_GAP)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int, *, uses_cache: bool) -> list[int]:
    # A copy, because "dynamic" rotary scaling remembers the longest sequence that it has seen.
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        use_cache=uses_cache,
        max_new_tokens=num_tokens,
        return_dict_in_generate=True,
        output_scores=True,
    )
    first, second = torch.stack(result.scores).float().topk(2).values.unbind(-1)
    assert (first - second).min() > CLEAR_GAP, "choose another seed: a tie proves nothing"
    output: list[int] = result.sequences[0, len(prompt) :].tolist()
    return output


def assert_same_tokens(
    llm: LLM, reference: Reference, indices: list[int], num_tokens: int = OUTPUT_TOKENS
) -> None:
    outputs = llm.generate(
        [reference.prompts[i] for i in indices],
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    found = [list(out.outputs[0].token_ids) for out in outputs]
    assert found == [
        reference.output(i, num_tokens, ours) for i, ours in zip(indices, found, strict=True)
    ]
    llm.engine.pool.check()
    (memory,) = llm.memory().models.values()
    assert memory.bytes_by_kind[Kind.KV] == 0


@pytest.mark.parametrize(
    ("reference", "kv_cache", "max_num_batched_tokens", "num_ahead"),
    cases(STEPS, STEP_TURNS, (STEPS[::2], STEPS[1::2])),
    indirect=["reference"],
)
def test_tokens_equal_transformers(
    reference: Reference, kv_cache: str, max_num_batched_tokens: int, num_ahead: int
) -> None:
    with LLM(
        reference.folder,
        memory="16MiB",
        kv_cache=kv_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        **(LARGE_PAGES if kv_cache == "virtual" else {}),
    ) as llm:
        llm.engine.num_ahead = num_ahead
        # The longest prompt would have only more of the same steps if each has one token.
        num_prompts = len(reference.prompts) - (max_num_batched_tokens == 1)
        assert_same_tokens(llm, reference, list(range(num_prompts)))
        assert sum(llm.engine.stats().num_preemptions.values()) == 0


@pytest.mark.parametrize("reference", [*EVERYWHERE, *HYBRIDS], indirect=True)
def test_rows_that_decode_apart_from_chunks(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, from the first token of a sequence on."""
    monkeypatch.setattr(spans, "keeps_decodes", lambda device: True)
    with LLM(reference.folder, memory="16MiB", max_num_batched_tokens=11) as llm:
        assert_same_tokens(llm, reference, list(range(len(reference.prompts))))


@pytest.mark.parametrize(
    ("reference", "kv_cache"),
    covering([*EVERYWHERE, "falcon_h1"], ["virtual", "paged"], strength=1),
    indirect=["reference"],
)
def test_tokens_of_layer_major_kv(reference: Reference, kv_cache: str) -> None:
    """With room for all, and with so little that sequences are preempted; prefixes are found."""
    options: Any = {"kv_cache": kv_cache, "kv_layout": "layer-major", "page_size": "4KiB"}
    longest = max(map(len, reference.prompts))
    with LLM(reference.folder, memory="16MiB", max_num_batched_tokens=11, **options) as llm:
        assert_same_tokens(llm, reference, list(range(len(reference.prompts))))
        (info,), (lane,) = llm.engine.models.values(), llm.engine.lanes.values()
        num_pages = lane.cache.footprint.most(longest, longest + OUTPUT_TOKENS)
    memory = info.weight_bytes + num_pages * 4096
    with LLM(reference.folder, memory=memory, max_num_batched_tokens=8, **options) as llm:
        assert_same_tokens(llm, reference, [2, 2, 1, 0, 3])
        assert_same_tokens(llm, reference, [3])
        assert llm.engine.stats().num_prefix_hit_tokens[info.name] > 0


@pytest.mark.parametrize(
    ("reference", "kv_cache", "num_ahead"),
    cases(PREEMPTIONS, PREEMPTION_TURNS, (PREEMPTIONS,)),
    indirect=["reference"],
)
def test_tokens_equal_transformers_under_preemption(
    reference: Reference, kv_cache: str, num_ahead: int
) -> None:
    """The pool holds the longest request and little more, so the first ones outgrow it together.

    Layers with a window take a step's tokens beside it, so steps are small then; sequences that are
    a few windows long hardly grow, and `test_windows.py` has preemptions of these.
    """
    options: Any = {"kv_cache": kv_cache, "page_size": "4KiB", "block_size": 4}
    if not num_ahead:
        options |= LARGE_PAGES
    longest = len(reference.prompts[2])
    with LLM(reference.folder, memory="16MiB", max_num_batched_tokens=8, **options) as llm:
        (info,), (lane,) = llm.engine.models.values(), llm.engine.lanes.values()
        num_pages = lane.cache.footprint.most(longest, longest + GROWING_TOKENS) + (
            not lane.has_windows
        )
        if lane.has_windows:
            options["max_num_batched_tokens"] = 8
        grows = not lane.has_windows
    with LLM(reference.folder, memory=info.weight_bytes + num_pages * 4096, **options) as llm:
        llm.engine.num_ahead = num_ahead
        assert_same_tokens(llm, reference, [2, 1, 1, 0, 2], GROWING_TOKENS)
        assert not grows or sum(llm.engine.stats().num_preemptions.values()) > 0


@pytest.mark.parametrize("architecture", ["llama-linear", "llama-dynamic", "llama-yarn"])
def test_rotary_scaling_stretches_the_context(architecture: str, tmp_path: Path) -> None:
    save_tiny(OUR_DECODER[architecture](), tmp_path)
    assert plan_model(Checkpoint.open(tmp_path)).max_model_len == MAX_TOKENS
