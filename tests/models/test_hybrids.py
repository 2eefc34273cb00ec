"""Our decoder of models with recurrent state: logits equal those of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.architectures import HYBRIDS, VOCAB_SIZE, save_tiny
from tests.models.dense_kv import DenseKV
from tests.models.serving import loaded_weights

from aquifer.models import plan_model
from aquifer.models.base import ModelInput
from aquifer.models.decoder import Decoder
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.weights.checkpoint import Checkpoint

LENGTHS = (19, 11)


@torch.inference_mode()
def served(plan: DecoderPlan, model: Decoder, prompts: list[torch.Tensor], chunk: int) -> list[Any]:
    """Logits of every token of each prompt, in steps of up to `chunk` tokens of each."""
    longest = max(map(len, prompts))
    slots = [2, 0, 1][: len(prompts)]
    kv = DenseKV(plan.kv_layout, 3, longest, plan.state_layout())
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, chunk):
        work = [i for i, ids in enumerate(prompts) if start < len(ids)]
        parts = [prompts[i][start : start + chunk] for i in work]
        counts = np.array([len(part) for part in parts])
        positions = torch.cat([torch.arange(start, start + len(part)) for part in parts])
        starts = np.full(len(work), start)
        view = kv.view(np.array([slots[i] for i in work]), starts, counts)
        batch = ModelInput(torch.cat(parts), positions, positions + 1)
        rows = model.logits(model.forward(batch, view))
        for i, part in zip(work, rows.split(counts.tolist()), strict=True):
            found[i].append(part)
    return [torch.cat(parts) for parts in found]


def assert_equal_logits(
    config: Any, folder: Path, seed: int = 1, most: float = 5e-5, most_mean: float = 3e-6
) -> None:
    """The decoder's logits are those of Transformers' model, for steps of each size.

    Args:
        config: of the model.
        folder: where it is saved.
        seed: of its weights and of the prompts.
        most: the largest error of a logit, relative to the largest logit.
        most_mean: the largest mean of these errors.
    """
    reference = save_tiny(config, folder, seed)
    checkpoint = Checkpoint.open(folder)
    plan = plan_model(checkpoint)
    assert isinstance(plan, DecoderPlan)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in LENGTHS]
    with torch.no_grad():
        expected = [reference(ids[None], use_cache=False).logits[0] for ids in prompts]
    with loaded_weights(checkpoint, plan) as tensors:
        model = plan.build(tensors)
        for chunk in (1, 7, max(LENGTHS)):
            for ours, theirs in zip(served(plan, model, prompts, chunk), expected, strict=True):
                assert theirs.std() > 0.05  # the comparison means nothing if all logits are alike
                error = (ours - theirs).abs() / theirs.abs().max()
                assert error.max() <= most
                assert error.mean() <= most_mean


def pick(generator: np.random.Generator, *choices: Any) -> Any:
    return choices[generator.integers(len(choices))]


def random_second(seed: int) -> Any:
    """A configuration of Mamba-2, alone or with attention, of random sizes and options."""
    random = np.random.default_rng(seed)
    heads, head_dim = pick(random, 2, 4, 6, 12), pick(random, 4, 6, 16)
    hidden = heads * head_dim // 2 * pick(random, 1, 2)
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": pick(random, 1, 2, 4),
        "tie_word_embeddings": pick(random, False, True),
        "pad_token_id": 0,
    }
    groups = pick(random, *(g for g in (1, 2, 3, 4) if heads % g == 0))
    state, taps, conv_bias = (
        pick(random, 1, 5, 16),
        pick(random, 2, 3, 4),
        pick(random, False, True),
    )
    expand = heads * head_dim // hidden
    if pick(random, False, True):
        return transformers.Mamba2Config(
            **common,
            hidden_size=hidden,
            expand=expand,
            num_heads=heads,
            head_dim=head_dim,
            n_groups=groups,
            state_size=state,
            conv_kernel=taps,
            use_conv_bias=conv_bias,
            use_bias=pick(random, False, True),
            chunk_size=8,
        )
    kind = pick(random, transformers.BambaConfig, transformers.FalconH1Config)
    extra: dict[str, Any] = {}
    if kind is transformers.BambaConfig:
        extra["attn_layer_indices"] = [common["num_hidden_layers"] - 1]
    else:
        extra["mamba_d_ssm"] = heads * head_dim
        extra["mamba_rms_norm"] = pick(random, False, True)
        extra["ssm_multipliers"] = random.uniform(0.5, 2.0, 5).tolist()
    return kind(
        **common,
        **extra,
        hidden_size=hidden,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=pick(random, 8, 12),
        intermediate_size=pick(random, 20, 32),
        mamba_expand=expand,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=groups,
        mamba_d_state=state,
        mamba_d_conv=taps,
        mamba_conv_bias=conv_bias,
        mamba_proj_bias=pick(random, False, True),
        mamba_chunk_size=8,
        max_position_embeddings=64,
    )


def random_first(seed: int) -> Any:
    """A configuration of Mamba or FalconMamba of random sizes and options."""
    random = np.random.default_rng(seed)
    kind = pick(random, transformers.MambaConfig, transformers.FalconMambaConfig)
    return kind(
        vocab_size=VOCAB_SIZE,
        hidden_size=pick(random, 12, 24, 40),
        num_hidden_layers=pick(random, 1, 3),
        expand=pick(random, 1, 2, 3),
        state_size=pick(random, 1, 6, 16),
        conv_kernel=pick(random, 2, 3, 4),
        time_step_rank=pick(random, 1, 5, "auto"),
        use_bias=pick(random, False, True),
        use_conv_bias=pick(random, False, True),
        tie_word_embeddings=pick(random, False, True),
        pad_token_id=0,
    )


def random_shared(seed: int) -> Any:
    """A configuration of Zamba2 of random sizes and options."""
    random = np.random.default_rng(seed)
    kinds = ["mamba", *(pick(random, "mamba", "hybrid") for _ in range(2)), "hybrid"]
    return transformers.Zamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=pick(random, 24, 48),
        num_hidden_layers=len(kinds),
        layers_block_type=kinds,
        num_attention_heads=pick(random, 2, 4),
        intermediate_size=pick(random, 20, 32),
        hidden_act=pick(random, "gelu", "silu"),
        n_mamba_heads=pick(random, 2, 4, 6),
        mamba_ngroups=pick(random, 1, 2),
        mamba_d_state=pick(random, 1, 5, 16),
        mamba_d_conv=pick(random, 2, 4),
        num_mem_blocks=pick(random, 1, 2),
        adapter_rank=pick(random, 1, 5),
        use_shared_attention_adapter=pick(random, False, True),
        use_mem_rope=pick(random, False, True),
        add_bias_linear=pick(random, False, True),
        chunk_size=8,
        max_position_embeddings=64,
        tie_word_embeddings=pick(random, True, False),
    )


@pytest.mark.parametrize("make_config", [random_first, random_second])
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(make_config: Callable[[int], Any], seed: int, tmp_path: Path) -> None:
    # With few numbers in a group of the norm, some are nearly all zero, and rounding counts more.
    assert_equal_logits(make_config(seed), tmp_path, seed, most=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_random_shared_blocks(seed: int, tmp_path: Path) -> None:
    # Adapters amplify errors of rounding: those of Transformers' own float32 logits, compared with
    # float64, have means up to 1.2e-5 for these seeds.
    assert_equal_logits(random_shared(seed), tmp_path, seed, most=1e-3, most_mean=3e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """One token at a time, in chunks, and whole prompts; two sequences in each step."""
    assert_equal_logits(HYBRIDS[name](), tmp_path)
