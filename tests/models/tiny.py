"""Tiny models for tests of the engine: checkpoints, plans, and references without a cache.

    llama       our decoder
    llama-tied  our decoder with other sizes, and the embedding as its head
    windows     our decoder, with a window in some of its layers
    sliding     our decoder, with a window in all of its layers
    no-kv       embedding, MLP and head: logits depend on a token and its position alone
    sparse-kv   six layers, every third with attention and KV, the others with an MLP
    recurrent   the same with recurrent state in every third layer

`plan_tiny` is a `Planner` for all of them. Vocabularies have at most 64 tokens, contexts at most
128. None has an end-of-sequence token: a test that wants to stop names the token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.checkpoints import llama_config, llama_weights, save_checkpoint

from aquifer.cache.base import (
    AttentionOptions,
    KVLayout,
    KVView,
    LayerKV,
    Rows,
    StateLayout,
    StateTensor,
)
from aquifer.models import Model, ModelInput, ModelPlan, plan_model
from aquifer.models.base import num_elements
from aquifer.weights.checkpoint import Checkpoint, stored_dtype
from aquifer.weights.parameters import Parameter, Source

Config = Mapping[str, Any]
Tensors = Mapping[str, torch.Tensor]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(KV layer, query, key, value), each [tokens, heads, head_dim], -> [tokens, heads, head_dim]."""

Recur = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer with state, inputs [tokens, width]) -> [tokens, width]."""

_EPS = 1e-5


@dataclass(frozen=True)
class TinyModel:
    """A configuration with deterministic weights, and the plain computation of its logits."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    reference: Callable[[Config, Tensors, torch.Tensor], torch.Tensor]

    def save(self, folder: Path) -> Path:
        """Write config.json and model.safetensors; returns the folder, which must be new."""
        return save_checkpoint(folder, self.config, self.weights)

    @torch.inference_mode()
    def forward_all(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token of one sequence, [tokens, vocab], computed without a cache."""
        return self.reference(self.config, self.weights, torch.tensor(token_ids))


def plan_tiny(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> ModelPlan:
    """Plan any of the tiny models; all other checkpoints go to `plan_model`."""
    model_type = checkpoint.config.get("model_type")
    if model_type == "tiny-no-kv":
        return NoKVPlan(checkpoint, dtype)
    if model_type == "tiny-sparse-kv":
        return SparseKVPlan(checkpoint, dtype)
    if model_type == "tiny-recurrent":
        return RecurrentPlan(checkpoint, dtype)
    return plan_model(checkpoint, dtype)


class _TinyPlan:
    """Plan of a model whose parameters are the stored tensors, one for one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        shapes: Mapping[str, tuple[int, ...]],
        kv_layers: tuple[LayerKV, ...],
    ) -> None:
        dtype = dtype or stored_dtype(checkpoint)
        self.config = checkpoint.config
        self.vocab_size: int = checkpoint.config["vocab_size"]
        self.kv_limits: tuple[int, ...] = ()
        self.has_reusable_kv = True
        self.max_model_len: int = checkpoint.config["max_position_embeddings"]
        self.kv_layout = KVLayout(kv_layers, dtype)
        self.parameters = tuple(
            Parameter(name, shape, dtype, (Source(name),)) for name, shape in shapes.items()
        )
        self.num_parameters = num_elements(self.parameters)

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout | None:
        return None


class NoKVPlan(_TinyPlan):
    """Plan of `no-kv`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        super().__init__(checkpoint, dtype, _no_kv_shapes(checkpoint.config), ())

    def build(self, tensors: Tensors) -> NoKVModel:
        return NoKVModel(self.kv_layout, self.vocab_size, tensors)


class SparseKVPlan(_TinyPlan):
    """Plan of `sparse-kv`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        config = checkpoint.config
        layer = LayerKV(config["num_key_value_heads"], config["head_dim"], config["head_dim"])
        num_kv_layers = sum(map(_has_kv, range(config["num_hidden_layers"])))
        super().__init__(checkpoint, dtype, _sparse_kv_shapes(config), (layer,) * num_kv_layers)

    def build(self, tensors: Tensors) -> Model:
        return SparseKVModel(self.config, self.kv_layout, tensors)


class RecurrentPlan(SparseKVPlan):
    """Plan of `recurrent`."""

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout | None:
        width = self.config["intermediate_size"]
        layer = (StateTensor("sum", (width,), dtype or torch.float32),)
        return StateLayout((layer,) * sum(map(_has_state, range(self.config["num_hidden_layers"]))))

    def build(self, tensors: Tensors) -> Model:
        return RecurrentModel(self.config, self.kv_layout, tensors)


class NoKVModel:
    """`Model` without any KV."""

    is_capturable = True

    def __init__(self, kv_layout: KVLayout, vocab_size: int, tensors: Tensors) -> None:
        self.kv_layout = kv_layout
        self.vocab_size = vocab_size
        self._tensors = tensors

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        return batch.of_wanted(_no_kv_hidden(self._tensors, batch.token_ids, batch.positions))

    def rehearsal(self) -> NoKVModel:
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._tensors["head"])


class SparseKVModel:
    """`Model` in which layers 2 and 5 have KV, as layers 0 and 1 of its `KVLayout`."""

    is_capturable = False  # `KVView.write` does not take the padded rows of a graph

    def __init__(self, config: Config, kv_layout: KVLayout, tensors: Tensors) -> None:
        self.kv_layout = kv_layout
        self.vocab_size: int = config["vocab_size"]
        self._config = config
        self._tensors = tensors

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        def attend(
            kv_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            kv.write(kv_layer, key, value)
            return kv.attend(kv_layer, query, AttentionOptions(query.shape[-1] ** -0.5))

        hidden = _sparse_kv_hidden(
            self._config, self._tensors, batch.token_ids, batch.positions, attend
        )
        return batch.of_wanted(hidden)

    def rehearsal(self) -> SparseKVModel:
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._tensors["head"])


class Fading:
    """A sum in which earlier inputs fade: h = 0.9 h + x."""

    def __init__(self, width: int) -> None:
        self.out_columns = width
        self.kind = width
        self.weights = None

    def run(
        self,
        inputs: torch.Tensor,
        out: torch.Tensor,
        states: Sequence[torch.Tensor],
        rows: Rows,
    ) -> None:
        (sums,) = states
        assert not rows.num_decodes, "on the host, all rows are chunks"
        if rows.chunks is None:
            return
        chunks = zip(rows.chunks.slots, rows.chunks.starts, rows.chunks.offsets[:-1], strict=True)
        for index, (slot, start, first) in enumerate(chunks):
            end = rows.chunks.offsets[index + 1]
            before = sums[slot] if start else torch.zeros_like(sums[slot])
            out[first:end] = fading_sums(inputs[first:end], before)
            sums[slot] = out[end - 1]


def fading_sums(inputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The sums after each of the inputs, [tokens, width]."""
    found = []
    for row in inputs:
        before = 0.9 * before + row
        found.append(before)
    return torch.stack(found)


class RecurrentModel:
    """`Model` in which layers 2 and 5 have KV, and layers 1 and 4 state."""

    is_capturable = False  # `KVView.write` does not take the padded rows of a graph

    def __init__(self, config: Config, kv_layout: KVLayout, tensors: Tensors) -> None:
        self.kv_layout = kv_layout
        self.vocab_size: int = config["vocab_size"]
        self._config = config
        self._tensors = tensors

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        def attend(
            kv_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            kv.write(kv_layer, key, value)
            return kv.attend(kv_layer, query, AttentionOptions(query.shape[-1] ** -0.5))

        def recur(layer: int, inputs: torch.Tensor) -> torch.Tensor:
            return kv.recur(layer, inputs, Fading(inputs.shape[1]))

        hidden = _sparse_kv_hidden(
            self._config, self._tensors, batch.token_ids, batch.positions, attend, recur
        )
        return batch.of_wanted(hidden)

    def rehearsal(self) -> RecurrentModel:
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._tensors["head"])


def _no_kv_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    vocab_size, hidden, mlp = (
        config[name] for name in ("vocab_size", "hidden_size", "intermediate_size")
    )
    return {
        "embed": (vocab_size, hidden),
        "positions": (config["max_position_embeddings"], hidden),
        "up": (mlp, hidden),
        "down": (hidden, mlp),
        "head": (vocab_size, hidden),
    }


def _no_kv_hidden(
    tensors: Tensors, token_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    x = tensors["embed"][token_ids] + tensors["positions"][positions]
    x = x + F.linear(F.silu(F.linear(x, tensors["up"])), tensors["down"])
    return F.rms_norm(x, x.shape[-1:], eps=_EPS)


def _has_kv(layer: int) -> bool:
    return layer % 3 == 2


def _has_state(layer: int) -> bool:
    """Only in `recurrent`."""
    return layer % 3 == 1


def _sparse_kv_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    vocab_size, hidden, mlp, head_dim = (
        config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    )
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    shapes = {
        "embed": (vocab_size, hidden),
        "positions": (config["max_position_embeddings"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        if _has_kv(layer):
            shapes[f"{layer}.qkv"] = (q_rows + 2 * kv_rows, hidden)
            shapes[f"{layer}.out"] = (hidden, q_rows)
        else:
            shapes[f"{layer}.up"] = (mlp, hidden)
            shapes[f"{layer}.down"] = (hidden, mlp)
    return shapes | {"head": (vocab_size, hidden)}


def _sparse_kv_hidden(
    config: Config,
    tensors: Tensors,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
    recur: Recur | None = None,
) -> torch.Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    x = tensors["embed"][token_ids] + tensors["positions"][positions]
    kv_layer = state_layer = 0
    for layer in range(config["num_hidden_layers"]):
        normed = F.rms_norm(x, x.shape[-1:], eps=_EPS)
        if _has_kv(layer):
            qkv = F.linear(normed, tensors[f"{layer}.qkv"]).unflatten(-1, (-1, config["head_dim"]))
            attended = attend(kv_layer, *qkv.split([heads, kv_heads, kv_heads], dim=1))
            x = x + F.linear(attended.flatten(1), tensors[f"{layer}.out"])
            kv_layer += 1
        else:
            up = F.linear(normed, tensors[f"{layer}.up"])
            if recur is not None and _has_state(layer):
                up = recur(state_layer, up)
                state_layer += 1
            x = x + F.linear(F.silu(up), tensors[f"{layer}.down"])
    return F.rms_norm(x, x.shape[-1:], eps=_EPS)


def _attend_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window_tokens: int | None = None
) -> torch.Tensor:
    """Causal attention within one sequence, each [tokens, heads, head_dim]."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    position = torch.arange(len(query))
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < (window_tokens or len(query)))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)


def _no_kv_logits(config: Config, weights: Tensors, token_ids: torch.Tensor) -> torch.Tensor:
    hidden = _no_kv_hidden(weights, token_ids, torch.arange(len(token_ids)))
    return F.linear(hidden, weights["head"])


def _sparse_kv_logits(
    config: Config, weights: Tensors, token_ids: torch.Tensor, recur: Recur | None = None
) -> torch.Tensor:
    def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _attend_whole(query, key, value)

    positions = torch.arange(len(token_ids))
    hidden = _sparse_kv_hidden(config, weights, token_ids, positions, attend, recur)
    return F.linear(hidden, weights["head"])


def _recurrent_logits(config: Config, weights: Tensors, token_ids: torch.Tensor) -> torch.Tensor:
    def recur(_: int, inputs: torch.Tensor) -> torch.Tensor:
        return fading_sums(inputs, torch.zeros_like(inputs[0]))

    return _sparse_kv_logits(config, weights, token_ids, recur)


def _llama_logits(config: Config, weights: Tensors, token_ids: torch.Tensor) -> torch.Tensor:
    head_dim = config["head_dim"]
    exponents = torch.arange(0, head_dim, 2) / head_dim
    angles = torch.arange(len(token_ids))[:, None] / config["rope_theta"] ** exponents
    cos, sin = (part[:, None] for part in (angles.cos(), angles.sin()))  # [tokens, 1, head_dim / 2]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"]).view(len(x), -1, head_dim)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    embed = weights["model.embed_tokens.weight"]
    x = embed[token_ids]
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    for i in range(config["num_hidden_layers"]):
        window = config.get("sliding_window") if kinds[i] == "sliding_attention" else None
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(normed, f"{attention}.{part}_proj") for part in "qkv")
        attended = _attend_whole(rotated(q), rotated(k), v, window).flatten(1)
        x = x + F.linear(attended, weights[f"{attention}.o_proj.weight"])
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (F.linear(normed, weights[f"{mlp}.{p}_proj.weight"]) for p in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights[f"{mlp}.down_proj.weight"])
    return F.linear(norm(x, "model.norm"), weights.get("lm_head.weight", embed))


def _llama(seed: int, **overrides: Any) -> TinyModel:
    entries = {"head_dim": 16, "max_position_embeddings": 128, "eos_token_id": None, **overrides}
    config = llama_config(**entries)
    weights = llama_weights(config, seed)
    for name, tensor in weights.items():
        if ".layers." in name and tensor.dim() == 2:
            tensor *= 3  # layers matter more than the embedding, so that outputs do not repeat
    return TinyModel(config, weights, _llama_logits)


def _own(
    name: str,
    seed: int,
    shapes: Callable[[Config], dict[str, tuple[int, ...]]],
    reference: Callable[[Config, Tensors, torch.Tensor], torch.Tensor],
    **entries: int,
) -> TinyModel:
    config = {
        "architectures": [f"Tiny-{name}"],
        "model_type": f"tiny-{name}",
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
        **entries,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {
        tensor: torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5
        for tensor, shape in shapes(config).items()
    }
    return TinyModel(config, weights, reference)


TINY_MODELS = {
    "llama": _llama(
        1,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
    ),
    "llama-tied": _llama(
        2,
        vocab_size=48,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=96,
        tie_word_embeddings=True,
    ),
    "no-kv": _own(
        "no-kv",
        3,
        _no_kv_shapes,
        _no_kv_logits,
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
    ),
    "sparse-kv": _own(
        "sparse-kv",
        4,
        _sparse_kv_shapes,
        _sparse_kv_logits,
        vocab_size=56,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
    "recurrent": _own(
        "recurrent",
        7,
        _sparse_kv_shapes,
        _recurrent_logits,
        vocab_size=56,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
    "windows": _llama(
        5,
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=11,
    ),
    "sliding": _llama(
        6,
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        sliding_window=9,
    ),
}
"""The models, by name."""
