"""Checkpoints of GPT-OSS with experts in MXFP4, as OpenAI publishes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.architectures import OUR_DECODER, save_tiny
from tests.mxfp4 import CONFIG, edit_config, experts_of, pack, quantise

from aquifer.bench.load import made_checkpoint, measure_load
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import SamplingParams
from aquifer.engine.reports import LoadProgress
from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.llm import LLM
from aquifer.memory.pool import Kind
from aquifer.models import plan_model
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.parameters import check_sources

from .serving import loaded_weights

MEMORY = "24MiB"
PROMPTS = [[5, 9, 2], list(range(3, 40)), [7] * 12]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-OSS of four layers that is not quantised yet."""
    save_tiny(OUR_DECODER["gpt_oss"](), tmp_path / "gpt-oss")
    return tmp_path / "gpt-oss"


def parameters(folder: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    with loaded_weights(checkpoint, plan_model(checkpoint, dtype)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_parameters_are_those_of_the_decoded_checkpoint(folder: Path, stored: torch.dtype) -> None:
    decoded_folder = quantise(folder, stored)
    for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
        found, expected = parameters(folder, dtype), parameters(decoded_folder, dtype)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == (dtype or stored)
            assert torch.equal(found[name], tensor), name


def test_parameters_are_those_that_transformers_reads(folder: Path) -> None:
    """Transformers decodes the same checkpoint."""
    quantise(folder, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    found = parameters(folder)
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        assert torch.equal(found[f"layers.{i}.experts_up"], experts.gate_up_proj.mT)
        assert torch.equal(found[f"layers.{i}.experts_down"], experts.down_proj.mT)
        assert torch.equal(found[f"layers.{i}.experts_up_bias"], experts.gate_up_proj_bias)
        assert torch.equal(found[f"layers.{i}.router"], layer.mlp.router.weight)


def test_layers_that_are_not_converted(folder: Path) -> None:
    """Each layer is read as it is stored."""
    decoded_folder = quantise(folder)
    plain = load_file(decoded_folder / "model.safetensors")
    names = [name for name in experts_of(plain) if ".layers.1." in name]

    def leave_layer_1(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            tensors[name] = plain[name]

    edit_tensors(folder, leave_layer_1)
    expected = parameters(decoded_folder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parameters(folder).items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache", ["virtual", "paged"])
def test_tokens_are_those_of_the_decoded_checkpoint(
    folder: Path, dtype: str, kv_cache: str
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    tokens, weight_bytes = [], []
    for each in (folder, quantise(folder)):
        options: dict[str, Any] = {"dtype": dtype, "kv_cache": kv_cache, "memory": MEMORY}
        with LLM(each, device="cpu", **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            [model] = llm.memory().models.values()
            weight_bytes.append(model.bytes_by_kind[Kind.WEIGHTS])
    assert [len(each) for each in tokens[0]] == [24] * len(PROMPTS)
    assert tokens[0] == tokens[1]
    assert weight_bytes[0] == weight_bytes[1]


def test_progress_counts_stored_bytes(folder: Path) -> None:
    quantise(folder)
    seen: list[LoadProgress] = []
    config = EngineConfig((ModelSpec("a", folder),), memory_bytes=24 << 20, max_num_seqs=2)
    engine = Engine.open(config, on_progress=seen.append)
    engine.close()
    stored_bytes = Checkpoint.open(folder).num_bytes
    reading = [each for each in seen if each.total == stored_bytes]
    assert [each.done for each in reading] == sorted(each.done for each in reading)
    assert reading[-1].done == stored_bytes


def test_a_made_checkpoint(folder: Path) -> None:
    """`bench load` makes one of the same kind; its size is that of the stored tensors."""
    quantise(folder)
    edit_config(folder, dtype="bfloat16")
    stored_bytes = Checkpoint.open(folder).num_bytes // 2  # of float32, but for the experts
    with made_checkpoint(folder, 3 * stored_bytes) as made:
        checkpoint = Checkpoint.open(made)
        assert "model.layers.0.mlp.experts.down_proj_scales" in checkpoint.tensors
        times = measure_load(made, "cpu", None, 1, from_pinned=False)
        assert times.num_bytes == checkpoint.num_bytes
        assert all(tensor.isfinite().all() for tensor in parameters(made).values())


# --- refused -------------------------------------------------------------------------------

UP = "model.layers.2.mlp.experts.gate_up_proj"
DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scales": (lambda t: t.pop(f"{UP}_scales"), rf"lacks the tensor '{UP}_scales'"),
    "no blocks": (lambda t: t.pop(f"{UP}_blocks"), rf"lacks the tensor '{UP}_blocks'"),
    "other scales": (
        lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"][:, :-1].clone()}),
        rf"'{UP}_scales' has shape \[6, 191, 2\], its config calls for \[6, 192, 2\]",
    ),
    "another size of blocks": (
        lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"].view(6, 192, 4, 8)}),
        rf"'{UP}_blocks' has shape \[6, 192, 4, 8\], its config calls for \[6, 192, 2, 16\]",
    ),
    "scales of floats": (
        lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"].float()}),
        rf"'{UP}_scales' is stored as torch.float32; MXFP4 is stored as torch.uint8",
    ),
    "another tensor too": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].char()}),
        r"'lm_head.weight' is stored as torch.int8; quantised checkpoints are not supported",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(folder: Path, damage: str) -> None:
    quantise(folder)
    act, message = DAMAGE[damage]
    edit_tensors(folder, act)
    config = EngineConfig((ModelSpec("a", folder),), memory_bytes=24 << 20, max_num_seqs=2)
    with pytest.raises(ConfigError, match=message):
        Engine.open(config)


def test_blocks_that_the_configuration_does_not_declare(folder: Path) -> None:
    quantise(folder)
    edit_config(folder, quantization_config=None)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(
        ConfigError, match=r"lacks the tensor 'model\.layers\.0\.mlp\.experts\.gate_up"
    ):
        check_sources(checkpoint, plan_model(checkpoint).parameters)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_sizes_that_blocks_do_not_divide(folder: Path, field: str) -> None:
    quantise(folder)
    edit_config(folder, **{field: 80})
    with pytest.raises(ConfigError, match=rf"{field} is 80; it must be a multiple of 32"):
        plan_model(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("quantisation", "method"),
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"bits": 4}, "unknown")],
)
def test_other_methods(folder: Path, quantisation: dict[str, Any], method: str) -> None:
    edit_config(folder, quantization_config=quantisation)
    with pytest.raises(UnsupportedModelError, match=rf"quantised \(.*{method}\); use a checkpoint"):
        plan_model(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ("mxfp4", "quantization_config is .*; it must be an object"),
        ({"quant_method": 4}, r"quantization_config\.quant_method is 4; it must be a text"),
    ],
)
def test_impossible_fields(folder: Path, quantisation: Any, message: str) -> None:
    edit_config(folder, quantization_config=quantisation)
    with pytest.raises(ConfigError, match=message):
        plan_model(Checkpoint.open(folder))


def test_other_families(tmp_path: Path) -> None:
    save_tiny(OUR_DECODER["qwen3_moe"](), tmp_path / "qwen3")
    edit_config(tmp_path / "qwen3", **CONFIG)
    edit_tensors(tmp_path / "qwen3", _pack_a_gate)
    checkpoint = Checkpoint.open(tmp_path / "qwen3")
    with pytest.raises(ConfigError, match="lacks the tensor"):
        check_sources(checkpoint, plan_model(checkpoint).parameters)


def _pack_a_gate(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    blocks, scales = pack(tensors.pop(name))
    tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
