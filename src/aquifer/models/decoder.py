"""Decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) with fused weights.

The Q, K and V projections are one matrix, the gate and up projections another: fewer and larger
products. Stored tensors are read straight into their rows, so fusing costs nothing at load time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from aquifer.cache.base import AttentionOptions, KVLayout, KVView, LayerKV
from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.kernels import KERNEL_ALIGNMENT_BYTES
from aquifer.kernels.linear import linear, norm_linear, silu_linear
from aquifer.kernels.norm import add_rms_norm
from aquifer.kernels.rotary import qk_norm_rope_write
from aquifer.models.base import ModelInput, StateLayout, num_elements
from aquifer.models.limits import (
    LEAST_POSITIONS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_VOCAB,
    MOST_WIDTH,
)
from aquifer.models.rope import RotaryAngles, RotarySettings
from aquifer.weights.checkpoint import Checkpoint, stored_dtype
from aquifer.weights.store import Parameter, Source

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"sliding_window": 4096, "use_sliding_window": True},
    "qwen2": {"attention_bias": True, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
"""Defaults of absent configuration entries that differ between model types."""

_FULL, _SLIDING = "full_attention", "sliding_attention"  # entries of `layer_types`


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and options of a decoder, read from its configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RotarySettings
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows_tokens: tuple[int | None, ...]  # for each layer: sliding window, None without one

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows_tokens)

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection."""
        kv_rows = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_rows, kv_rows

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Layout of one token's KV, the same in every layer."""
        layer = LayerKV(self.num_kv_heads, self.head_dim, self.head_dim)
        return KVLayout((layer,) * self.num_layers, dtype)

    @classmethod
    def read(cls, fields: Fields, architecture: str) -> DecoderConfig:
        """Read a `config.json`, as written by Transformers 4 or 5.

        Args:
            fields: its fields.
            architecture: for messages.

        Raises:
            ConfigError: a field is missing or impossible.
            UnsupportedModelError: it asks for something that this decoder does not implement.
        """
        model_type = fields.text("model_type")
        known = fields.with_defaults(_DEFAULTS[model_type])
        hidden_size = known.integer("hidden_size", 1, MOST_WIDTH)
        num_heads = known.integer("num_attention_heads", 1, MOST_HEADS)
        num_kv_heads = known.integer("num_key_value_heads", 1, MOST_HEADS, default=num_heads)
        if num_heads % num_kv_heads:
            raise known.error("num_key_value_heads", f"a divisor of the {num_heads} heads")
        if "head_dim" not in known and hidden_size % num_heads:
            raise known.error(
                "hidden_size", f"a multiple of the {num_heads} heads, or head_dim set"
            )
        head_dim = known.integer("head_dim", 1, MOST_WIDTH, default=hidden_size // num_heads)
        if head_dim % 2 and "head_dim" in known:
            raise known.error("head_dim", "even")
        if head_dim % 2:
            raise known.error("hidden_size", f"an even multiple of the {num_heads} heads")
        max_positions = known.integer("max_position_embeddings", LEAST_POSITIONS, MOST_POSITIONS)
        has_bias = known.flag("attention_bias", default=False)
        activation = known.text("hidden_act", default="silu")
        if activation != "silu":
            raise UnsupportedModelError(architecture, f"its hidden_act {activation!r} is not silu")
        rope = RotarySettings.read(known, head_dim, max_positions)
        if rope.partial_factor != 1.0:
            raise UnsupportedModelError(
                architecture, "it rotates only a part of each head (partial_rotary_factor)"
            )
        return cls(
            vocab_size=known.integer("vocab_size", 1, MOST_VOCAB),
            hidden_size=hidden_size,
            intermediate_size=known.integer("intermediate_size", 1, MOST_WIDTH),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=known.number("rms_norm_eps", 1e-30, 1.0, default=1e-6),
            rope=rope,
            qkv_bias=has_bias,
            out_bias=has_bias and model_type != "qwen2",
            mlp_bias=known.flag("mlp_bias", default=False),
            qk_norm=model_type == "qwen3",
            tied_embeddings=known.flag("tie_word_embeddings", default=False),
            windows_tokens=_windows_tokens(fields, known),
        )


def _windows_tokens(fields: Fields, known: Fields) -> tuple[int | None, ...]:
    """Sliding window of each layer; absent `layer_types` are filled in as Transformers does.

    Args:
        fields: the configuration.
        known: the same with the defaults of its model type.
    """
    num_layers = known.integer("num_hidden_layers", 1, MOST_LAYERS)
    window: int | None = None
    is_null = "sliding_window" in fields.values and "sliding_window" not in fields
    uses_window = known.flag("use_sliding_window", default=False) and not is_null
    if uses_window and "sliding_window" in known:
        window = known.integer("sliding_window", 1, MOST_POSITIONS)
    if known.text("model_type") == "mistral" and "layer_types" not in known:
        return (window,) * num_layers
    first = known.integer("max_window_layers", 0, MOST_LAYERS, default=0)
    layer_types = known.texts("layer_types") or tuple(
        _SLIDING if i >= first else _FULL for i in range(num_layers)
    )
    if len(layer_types) != num_layers or not {_SLIDING, _FULL}.issuperset(layer_types):
        raise known.error(
            "layer_types", f'a list of "{_FULL}" or "{_SLIDING}" for each of {num_layers} layers'
        )
    return tuple(window if kind == _SLIDING else None for kind in layer_types)


class DecoderPlan:
    """`ModelPlan` of a decoder.

    Args:
        checkpoint: an opened checkpoint of the Llama family.
        dtype: dtype of weights and KV; None means the checkpoint's own.

    Raises:
        ConfigError: a field of the configuration is missing or impossible.
        UnsupportedModelError: it asks for something that this decoder does not implement.
    """

    state_layout: StateLayout | None = None

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self.config = DecoderConfig.read(checkpoint.fields, checkpoint.architecture)
        self.vocab_size = self.config.vocab_size
        self.max_model_len = self.config.rope.max_model_len
        self.kv_layout = self.config.kv_layout(dtype or stored_dtype(checkpoint))
        # Names in a checkpoint of the base model, saved without its head, have no prefix.
        self._prefix = "" if "embed_tokens.weight" in checkpoint.tensors else "model."
        self.parameters = self._parameters()
        self.num_parameters = num_elements(self.parameters)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Decoder:
        """See `ModelPlan.build`."""
        return Decoder(self.config, self.kv_layout, tensors)

    def _parameters(self) -> list[Parameter]:
        c = self.config
        parameters: list[Parameter] = []

        def add(name: str, shape: tuple[int, ...], *sources: str | Source) -> None:
            full = tuple(s if isinstance(s, Source) else Source(s) for s in sources)
            parameters.append(Parameter(name, shape, self.kv_layout.dtype, full))

        def add_fused(
            name: str, kind: str, columns: int, prefix: str, parts: Mapping[str, int]
        ) -> None:
            """Add one matrix or bias that holds several stored ones, one below the other."""
            sources, row = [], 0
            for part, rows in parts.items():
                sources.append(Source(f"{prefix}.{part}.{kind}", (slice(row, row + rows),)))
                row += rows
            add(f"{name}.{kind}", (row, columns) if kind == "weight" else (row,), *sources)

        add("embed", (c.vocab_size, c.hidden_size), f"{self._prefix}embed_tokens.weight")
        qkv = dict(zip(("q_proj", "k_proj", "v_proj"), c.qkv_rows, strict=True))
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        for i in range(c.num_layers):
            layer, stored = f"layers.{i}", f"{self._prefix}layers.{i}"
            attention, mlp = f"{stored}.self_attn", f"{stored}.mlp"
            add(f"{layer}.norm1", (c.hidden_size,), f"{stored}.input_layernorm.weight")
            add_fused(f"{layer}.qkv", "weight", c.hidden_size, attention, qkv)
            if c.qkv_bias:
                add_fused(f"{layer}.qkv", "bias", c.hidden_size, attention, qkv)
            if c.qk_norm:
                add(f"{layer}.q_norm", (c.head_dim,), f"{attention}.q_norm.weight")
                add(f"{layer}.k_norm", (c.head_dim,), f"{attention}.k_norm.weight")
            add(f"{layer}.out.weight", (c.hidden_size, c.qkv_rows[0]), f"{attention}.o_proj.weight")
            if c.out_bias:
                add(f"{layer}.out.bias", (c.hidden_size,), f"{attention}.o_proj.bias")
            add(f"{layer}.norm2", (c.hidden_size,), f"{stored}.post_attention_layernorm.weight")
            add_fused(f"{layer}.gate_up", "weight", c.hidden_size, mlp, gate_up)
            add(
                f"{layer}.down.weight",
                (c.hidden_size, c.intermediate_size),
                f"{mlp}.down_proj.weight",
            )
            if c.mlp_bias:
                add_fused(f"{layer}.gate_up", "bias", c.hidden_size, mlp, gate_up)
                add(f"{layer}.down.bias", (c.hidden_size,), f"{mlp}.down_proj.bias")
        add("norm", (c.hidden_size,), f"{self._prefix}norm.weight")
        if not c.tied_embeddings:
            add("head", (c.vocab_size, c.hidden_size), "lm_head.weight")
        return parameters


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], name: str) -> _Linear:
        return cls(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: torch.Tensor
    qkv: _Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: _Linear
    norm2: torch.Tensor
    gate_up: _Linear
    down: _Linear
    window_tokens: int | None

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], name: str, window_tokens: int | None
    ) -> _Layer:
        return cls(
            norm1=tensors[f"{name}.norm1"],
            qkv=_Linear.of(tensors, f"{name}.qkv"),
            q_norm=tensors.get(f"{name}.q_norm"),
            k_norm=tensors.get(f"{name}.k_norm"),
            out=_Linear.of(tensors, f"{name}.out"),
            norm2=tensors[f"{name}.norm2"],
            gate_up=_Linear.of(tensors, f"{name}.gate_up"),
            down=_Linear.of(tensors, f"{name}.down"),
            window_tokens=window_tokens,
        )


class Decoder:
    """`Model` of the Llama family."""

    is_capturable = True

    def __init__(
        self,
        config: DecoderConfig,
        kv_layout: KVLayout,
        tensors: Mapping[str, torch.Tensor],
        layers: Sequence[int] | None = None,
    ) -> None:
        c = self._config = config
        self._tensors = tensors
        self.kv_layout = kv_layout
        self.vocab_size = c.vocab_size
        self._angles = RotaryAngles(c.rope, tensors["embed"].device)
        self._scale = c.head_dim**-0.5
        self._embed = tensors["embed"]
        # With their numbers, by which their KV is found.
        self._layers = [
            (i, _Layer.of(tensors, f"layers.{i}", c.windows_tokens[i]))
            for i in (range(len(c.windows_tokens)) if layers is None else layers)
        ]
        self._norm = tensors["norm"]
        self._head = tensors.get("head", self._embed)

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """See `Model.forward`."""
        eps = self._config.norm_eps
        residual = F.embedding(batch.token_ids, self._embed)  # [tokens, hidden]
        delta: torch.Tensor | None = None  # output of the last sub-layer, not yet added to it
        cos, sin = self._angles(batch.positions, batch.context_lengths)
        for i, layer in self._layers:
            qkv, residual = norm_linear(
                delta, residual, layer.norm1, eps, layer.qkv.weight, layer.qkv.bias
            )
            delta = layer.out(self._attention(i, layer, qkv, cos, sin, kv))
            gate_up, residual = norm_linear(
                delta, residual, layer.norm2, eps, layer.gate_up.weight, layer.gate_up.bias
            )
            delta = silu_linear(gate_up, layer.down.weight, layer.down.bias)
        assert delta is not None, "a decoder has layers"
        return add_rms_norm(delta, residual, self._norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return linear(hidden, self._head, None)

    def rehearsal(self) -> Decoder:
        """The first layer, before which nothing is added to the residual, and one of each kind."""
        # A kernel is compiled for aligned addresses and for others.
        kinds = list(
            zip(
                self._config.windows_tokens,
                self.kv_layout.alignments(KERNEL_ALIGNMENT_BYTES),
                strict=True,
            )
        )
        layers = [0, *(i for i, kind in enumerate(kinds) if i and kind not in kinds[1:i])]
        return Decoder(self._config, self.kv_layout, self._tensors, layers)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVView,
    ) -> torch.Tensor:
        """Write K and V to the cache and attend: [tokens, q + k + v rows] -> [tokens, q rows]."""
        c = self._config
        query = qkv.new_empty(len(qkv), c.num_heads, c.head_dim)
        qk_norm_rope_write(
            qkv, layer.q_norm, layer.k_norm, cos, sin, query, *kv.destination(index), eps=c.norm_eps
        )
        how = AttentionOptions(self._scale, layer.window_tokens)
        return kv.attend(index, query, how).flatten(1)
