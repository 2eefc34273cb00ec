"""Our decoder of models with recurrent state: logits equal those of Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import HYBRIDS, VOCAB_SIZE, save_tiny
from tests.cases import EVERY_CASE
from tests.kernels.interpreter import interpret
from tests.models.dense_kv import DenseKV
from tests.models.serving import StepKV, loaded_weights
from torch.utils._python_dispatch import TorchDispatchMode

from aquifer.cache.base import (
    AttentionOptions,
    KVView,
    Recurrence,
    StateLayout,
    StateTensor,
)
from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models import plan_model
from aquifer.models.base import ModelInput
from aquifer.models.decoder import Decoder
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.models.families import FAMILIES
from aquifer.models.limits import UNLIMITED_POSITIONS
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.weights.checkpoint import Checkpoint

LENGTHS = (19, 11)
IN_KERNELS = ("falcon_h1-norm", "nemotron_h", "jamba")
"""The architectures that also run in Triton's interpreter, which takes seconds for each."""


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


def random_delta(seed: int) -> Any:
    """A configuration of Qwen3-Next of random sizes and options."""
    random = np.random.default_rng(seed)
    key_heads, num_layers = pick(random, 1, 2, 3), pick(random, 1, 2, 3)
    kinds = [pick(random, "linear_attention", "full_attention") for _ in range(num_layers - 1)]
    heads = pick(random, (1, 1), (2, 1), (3, 3))
    return transformers.Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=pick(random, 24, 40),
        intermediate_size=pick(random, 20, 32),
        num_hidden_layers=num_layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=pick(random, 8, 24),
        attention_bias=pick(random, False, True),
        layer_types=[*kinds, "linear_attention"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * pick(random, 1, 2, 3),
        linear_key_head_dim=pick(random, 8, 20),
        linear_value_head_dim=pick(random, 8, 20),
        linear_conv_kernel_dim=pick(random, 2, 3, 4),
        num_experts=pick(random, 0, 3),
        num_experts_per_tok=pick(random, 1, 2),
        moe_intermediate_size=pick(random, 12, 20),
        shared_expert_intermediate_size=pick(random, 8, 24),
        norm_topk_prob=pick(random, False, True),
        decoder_sparse_step=pick(random, 1, 2),
        tie_word_embeddings=pick(random, False, True),
        max_position_embeddings=64,
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


@pytest.mark.parametrize("make_config", [random_first, random_second, random_delta])
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(make_config: Callable[[int], Any], seed: int, tmp_path: Path) -> None:
    # With few numbers in a group of the norm, some are nearly all zero, and rounding counts more.
    assert_equal_logits(make_config(seed), tmp_path, seed, most=1e-3, most_mean=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_random_shared_blocks(seed: int, tmp_path: Path) -> None:
    # Adapters amplify errors of rounding: those of Transformers' own float32 logits, compared with
    # float64, have means up to 1.2e-5 for these seeds.
    assert_equal_logits(random_shared(seed), tmp_path, seed, most=1e-3, most_mean=3e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """One token at a time, in chunks, and whole prompts; two sequences in each step."""
    assert_equal_logits(HYBRIDS[name](), tmp_path)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon_h1"])
def test_bounds_of_time_steps(name: str, tmp_path: Path) -> None:
    """They hold for all tokens. In Transformers, not for those that `generate` adds."""
    config = HYBRIDS[name]()
    config.time_step_limit = (0.5, 1.0)
    assert_equal_logits(config, tmp_path / "bounded")
    config.time_step_limit = (0.0, math.inf)
    free, bounded = (
        plan_model(Checkpoint.without_tensors(folder))
        for folder in (save_config(config, tmp_path / "free"), tmp_path / "bounded")
    )
    assert isinstance(free, DecoderPlan)
    assert isinstance(bounded, DecoderPlan)
    assert isinstance(free.spec.mixer, Mamba2)
    assert free.spec.mixer.dt_limit == (0.0, math.inf)
    assert bounded.spec.mixer == replace(free.spec.mixer, dt_limit=(0.5, 1.0))


def save_config(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", HYBRIDS if EVERY_CASE else IN_KERNELS)
def test_logits_of_the_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: rows that decode beside chunks and rows of padding, all in Triton kernels."""
    save_tiny(HYBRIDS[name](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint)
    assert isinstance(plan, DecoderPlan)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in (6, 7))
    kv = StepKV(plan.kv_layout, 3, 8, plan.state_layout())
    steps = [
        # Slots, starts, tokens of each, and how many of them decode.
        ([2], [0], [first[:4]], 0),
        ([2, 1], [4, 0], [first[4:5], second[:5]], 1),
        ([-1, 2, 1], [0, 5, 5], [first[:1], first[5:], second[5:6]], 3),
        ([1], [6], [second[6:]], 1),
    ]
    found: dict[int, list[torch.Tensor]] = {-1: [], 1: [], 2: []}
    with loaded_weights(checkpoint, plan) as tensors, torch.inference_mode():
        model = plan.build(tensors)
        expected = served(plan, model, [first, second], 7)
        interpret(monkeypatch)
        for slots, starts, parts, num_decodes in steps:
            counts = [len(part) for part in parts]
            view = kv.view(np.array(slots), np.array(starts), np.array(counts), num_decodes)
            positions = torch.cat(
                [torch.arange(b, b + n) for b, n in zip(starts, counts, strict=True)]
            )
            lengths = torch.cat(
                [torch.full((n,), s + 1) for s, n in zip(slots, counts, strict=True)]
            )
            hidden = model.forward(ModelInput(torch.cat(parts), positions, lengths), view)
            rows = model.logits(hidden).split(counts)
            for slot, part in zip(slots, rows, strict=True):
                found[slot].append(part)
    for slot, theirs in zip((2, 1), expected, strict=True):
        error = (torch.cat(found[slot]) - theirs).abs() / theirs.abs().max()
        assert error.max() <= 5e-5


class Products(TorchDispatchMode):
    """Counts the products of matrices since it was last asked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        result: torch.Tensor = func(*args, **(kwargs or {}))
        return result

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


class Cuts:
    """A `KVView` that notes how many products come before each place where a step is cut."""

    def __init__(self, view: KVView, products: Products) -> None:
        self._view = view
        self._products = products
        self.destination, self.whole_prompts = view.destination, view.whole_prompts
        self.decoding = None
        self.write = view.write
        self.counts: list[int] = []

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        self.counts.append(self._products.taken())
        result = self._view.attend(layer, query, how)
        self._products.taken()
        return result

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        self.counts.append(self._products.taken())
        result = self._view.recur(layer, inputs, recurrence)
        self._products.taken()
        return result


@pytest.mark.parametrize("name", HYBRIDS)
def test_no_piece_of_a_captured_step_is_empty(name: str, tmp_path: Path) -> None:
    """There is a product before, between and after the places where the step is cut."""
    save_tiny(HYBRIDS[name](), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint)
    state = plan.state_layout()
    assert state is not None
    ids = positions = torch.arange(5)
    one = np.array([0])
    view = DenseKV(plan.kv_layout, 1, 5, state).view(one, one, np.array([5]))
    with (
        loaded_weights(checkpoint, plan) as tensors,
        torch.inference_mode(),
        Products() as products,
    ):
        model = plan.build(tensors)
        cuts = Cuts(view, products)
        model.logits(model.forward(ModelInput(ids, positions, positions + 1), cuts))
        assert all(cuts.counts)
        assert len(cuts.counts) == len(plan.kv_layout.layers) + len(state.layers)
        assert products.taken()


def test_state_of_a_layer(tmp_path: Path) -> None:
    """The convolution's state has the dtype of the weights, and the recurrence's one of its own."""
    save_tiny(HYBRIDS["jamba"](), tmp_path)
    plan = plan_model(Checkpoint.open(tmp_path), torch.bfloat16)
    layer = (
        StateTensor("conv", (128, 3), torch.bfloat16),
        StateTensor("ssm", (128, 6), torch.float32),
    )
    assert plan.state_layout(torch.float32) == StateLayout((layer,) * 2)
    assert len(plan.kv_layout.layers) == 2
    dtypes = {each.name.rpartition(".mixer.")[2]: each.dtype for each in plan.parameters}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"A_log", "D", "dt_proj.bias"}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


# Transformers stores adapters that an untied block of Zamba2 never uses.
@pytest.mark.parametrize("name", sorted(HYBRIDS.keys() - {"zamba2-untied"}))
def test_plan_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """With tensors and from the configuration alone."""
    config = HYBRIDS[name]()
    reference = save_tiny(config, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    whole = plan_model(checkpoint)
    plan = plan_model(Checkpoint.without_tensors(tmp_path))
    longest = getattr(config, "max_position_embeddings", UNLIMITED_POSITIONS)
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    num_mixing = sum(kind in ("linear_attention", "hybrid") for kind in kinds)
    num_attending = sum(kind in ("full_attention", "hybrid") for kind in kinds)
    stored = {source.name for each in whole.parameters for source in each.sources}
    assert stored == set(checkpoint.tensors)
    tensors = dict(reference.named_parameters())
    tensors |= {key: each for key, each in reference.named_buffers() if "e_score" in key}
    assert whole.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    for each in (whole, plan):
        assert each.max_model_len == longest
        assert len(each.kv_layout.layers) == num_attending
        state = each.state_layout()
        assert state is not None
        assert len(state.layers) == num_mixing
        assert each.num_parameters == whole.num_parameters


def other_names(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint under the other names that there are for them."""
    renamed = {}
    for key, tensor in tensors.items():
        if name == "nemotron_h":
            is_base = key.startswith("backbone.")
            key = (
                key.replace("backbone.", "model.")
                if is_base
                else key.replace("model.", "backbone.")
            )
        for old, new in (
            ("input_linear.weight", "experts.gate_up_proj"),
            ("output_linear.weight", "experts.down_proj"),
            ("router.layer.weight", "router.weight"),
        ):
            if name == "granitemoehybrid" and "block_sparse_moe" in key:
                key = key.replace(old, new)
        renamed[key] = tensor
    if name != "granitemoehybrid":
        singles = {}
        for key in [key for key in renamed if ".experts.0." in key]:
            parts, number = [], 0
            while (found := key.replace(".experts.0.", f".experts.{number}.")) in renamed:
                parts.append(renamed.pop(found))
                number += 1
            singles[key] = torch.stack(parts)
        for key, tensor in singles.items():
            fused = key.replace(".experts.0.", ".experts.").removesuffix(".weight")
            if fused.endswith("gate_proj"):
                up = singles[key.replace("gate_proj", "up_proj")]
                renamed[fused.replace("gate_proj", "gate_up_proj")] = torch.cat((tensor, up), 1)
            elif name != "jamba" or not fused.endswith("up_proj"):
                renamed[fused] = tensor
    return renamed


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "jamba"])
def test_other_names_of_stored_tensors(name: str, tmp_path: Path) -> None:
    """Checkpoints that Transformers writes, and those with the names of its modules."""
    save_tiny(HYBRIDS[name](), tmp_path)
    file = tmp_path / "model.safetensors"
    with loaded_weights(
        Checkpoint.open(tmp_path), plan_model(Checkpoint.open(tmp_path))
    ) as tensors:
        before = {key: tensor.clone() for key, tensor in tensors.items()}
    stored = load_file(file)
    renamed = other_names(name, stored)
    assert set(renamed) != set(stored)
    save_file(renamed, file)
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint)
    assert {s.name for each in plan.parameters for s in each.sources} == set(checkpoint.tensors)
    with loaded_weights(checkpoint, plan) as tensors:
        assert tensors.keys() == before.keys()
        assert all(torch.equal(tensor, before[key]) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("bamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu"),
        ("mamba", {"hidden_act": "relu"}, "hidden_act 'relu' is not silu"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not silu"),
        ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "another activation than relu2"),
    ],
)
def test_what_is_not_implemented_is_refused(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    values = HYBRIDS[name]().to_dict()
    FAMILIES[name](Fields(Path("config.json"), values), name)
    with pytest.raises(UnsupportedModelError, match=f"cannot serve {name}: .*{reason}"):
        FAMILIES[name](Fields(Path("config.json"), values | changes), name)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("mamba2", {"head_dim": 8}, "head_dim"),
        ("mamba2", {"n_groups": 3}, "n_groups"),
        ("mamba2", {"num_heads": 7}, "num_heads"),
        ("mamba2", {"conv_kernel": 1}, "conv_kernel"),
        ("mamba2", {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        ("mamba", {"time_step_rank": 0}, "time_step_rank"),
        ("bamba", {"mamba_d_head": 20}, "mamba_d_head"),
        ("granitemoehybrid", {"layer_types": ["mamba", "sliding_attention"]}, "layer_types"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("jamba", {"attn_layer_offset": 9}, "attn_layer_offset"),
        ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type"),
        ("nemotron_h", {"n_group": 3}, "n_group"),
        ("nemotron_h", {"n_groups": 5}, "n_groups"),
    ],
)
def test_impossible_configurations(name: str, changes: dict[str, Any], field: str) -> None:
    values = HYBRIDS[name]().to_dict()
    if "layer_types" in changes:
        values.pop("layers_block_type", None)
    with pytest.raises(ConfigError, match=field):
        FAMILIES[name](Fields(Path("config.json"), values | changes), name)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_width_of_the_mixer(name: str, tmp_path: Path) -> None:
    """`intermediate_size` counts more than `expand`, as checkpoints of FalconMamba need."""
    config = HYBRIDS[name]()
    config.expand, config.intermediate_size = 16, 96
    assert_equal_logits(config, tmp_path)


def test_defaults_of_absent_entries() -> None:
    """Those of Transformers' configuration classes."""
    for name in sorted(HYBRIDS):
        if "-" in name:
            continue
        config = type(HYBRIDS[name]())()
        values = config.to_dict()
        sizes = ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"]
        sizes += ["rope_parameters", "layers_block_type", "layer_types"]
        sizes += [] if name.endswith("mamba") else ["intermediate_size"]
        needed = {key: values[key] for key in sizes if key in values}
        given = Fields(Path("config.json"), {"model_type": name, **needed})
        whole = Fields(Path("config.json"), values)
        ours, theirs = (FAMILIES[name](fields, name) for fields in (given, whole))
        assert replace(ours, ropes=()) == replace(theirs, ropes=())
        for rope, expected in zip(ours.ropes, theirs.ropes, strict=True):
            assert torch.equal(rope.frequencies, expected.frequencies)
