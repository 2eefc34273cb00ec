"""Checks of a loaded model that need a run of it: a few tokens, by its own code and as served.

The probe compares the KV layout of the plan with the keys and values that attention is called with.
It also reads each layer's sliding window from the mask that the model asks for, because that mask
is what its own attention obeys; the `sliding_window` argument is only a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from aquifer.cache.base import KVLayout, LayerKV, Rows, Spans
from aquifer.cache.view import StepView, Workspaces
from aquifer.errors import AquiferError, UnsupportedModelError, one_line
from aquifer.kernels import compiled_together
from aquifer.models.base import ModelInput
from aquifer.models.transformers.model import SERVE, TransformersModel
from aquifer.models.transformers.parts import EXPERTS, use_own_parts

_PROBE = "aquifer-probe"  # unlike SERVE, also in the mask registry
_IMPLEMENTED_KWARGS = frozenset({"dropout", "is_causal", "sliding_window"})
_UNRELATED_KWARGS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_PROBE_TOKENS = 6
# Allowed relative error of a token's logits. Large in 16 bits, where rounding errors go through all
# layers; the error from a wrong mask, position or scale is much larger still.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_TOLERANCE_16_BITS = 0.25

_Span = tuple[int, int, int]
"""(sequence, its tokens served in earlier steps, its tokens in this step)."""


def probe(
    model: Any,
    architecture: str,
    *,
    kv_layout: KVLayout,
    vocab_size: int,
    max_tokens: int,
    device: torch.device,
) -> TransformersModel:
    """Check that a model can be served, and make it ready for that.

    Args:
        model: the model, with its weights.
        architecture: for messages.
        kv_layout: layout of one token's KV according to the plan.
        vocab_size: rows of the embedding.
        max_tokens: the longest context.
        device: device of the weights.

    Raises:
        UnsupportedModelError: the model cannot be served; the message says why.
    """
    num_tokens = min(_PROBE_TOKENS, max_tokens)
    ids = torch.arange(1, num_tokens + 1, device=device) * 7919 % vocab_size
    try:
        with torch.no_grad():
            return _Probe(model, architecture, kv_layout, vocab_size, max_tokens).run(ids)
    except (AquiferError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModelError(architecture, f"its code failed: {one_line(error)}") from error


@dataclass(slots=True)
class _Probe:
    """Runs a few tokens: records how attention is called, and compares logits as served."""

    model: Any
    architecture: str
    kv_layout: KVLayout
    vocab_size: int
    max_tokens: int
    windows_tokens: list[int | None] = field(default_factory=list)  # of the layers recorded so far
    # Masks that the model was given, with the window that each one stands for.
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)

    def run(self, ids: torch.Tensor) -> TransformersModel:
        """Record attention over the tokens `ids`, then compare logits as served with its own."""
        self._record(ids)
        with _implementations(self.model, "eager", "eager"):
            expected = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        use_own_parts(self.model)
        served = TransformersModel(
            self.model, self.kv_layout, self.vocab_size, tuple(self.windows_tokens)
        )
        self._compare(ids, expected, served)
        return served

    def _record(self, ids: torch.Tensor) -> None:
        token = _PROBING.set(self)
        try:
            with _implementations(self.model, _PROBE, EXPERTS):
                self.model(input_ids=ids[None], position_ids=_arange(ids), use_cache=False)
        finally:
            _PROBING.reset(token)
        if len(self.windows_tokens) != len(self.kv_layout.layers):
            self.refuse(
                f"attention was computed {len(self.windows_tokens)} times in "
                f"{len(self.kv_layout.layers)} layers"
            )

    def _compare(
        self, ids: torch.Tensor, expected: torch.Tensor, served: TransformersModel
    ) -> None:
        """Compare with its own logits [tokens, vocab], in float32.

        Serve the tokens in two chunks, the second after tokens of another sequence.

        The median over tokens decides: in 16 bits a mixture of experts may choose another expert
        on a tie, but an error of principle affects all of the second chunk.
        """
        layout, count = self.kv_layout, len(ids)
        stored = torch.empty(2, count, layout.token_elements, dtype=layout.dtype, device=ids.device)
        layers = layout.split(stored)
        first = count // 3  # tokens of the first chunk
        other = first + 1  # tokens of the other sequence, so that no row equals its position
        positions = _arange(ids)[0]

        def serve(ids: torch.Tensor, positions: torch.Tensor, *spans: _Span) -> torch.Tensor:
            rows = Rows.of(Spans.make(*np.array(spans, np.int64).T), 0, ids.device)
            kv = StepView(layout, layers, rows, None, Workspaces())
            batch = ModelInput(ids, positions, positions + 1)
            return served.logits(served.forward(batch, kv)).float()

        def serve_all() -> torch.Tensor:
            start = serve(ids[:first], positions[:first], (0, 0, first))
            rest = serve(
                torch.cat([ids.flip(0)[:other], ids[first:]]),
                torch.cat([positions[:other], positions[first:]]),
                (1, 0, other),
                (0, first, count - first),
            )[other:]
            return torch.cat([start, rest])

        if ids.is_cuda:
            with compiled_together(ids.device):
                serve_all()
        actual = serve_all()
        if actual.shape[1] != self.vocab_size:
            self.refuse(f"its head gives {actual.shape[1]} scores for {self.vocab_size} tokens")
        spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
        tolerance = _TOLERANCE.get(layout.dtype, _TOLERANCE_16_BITS)
        if not ((actual - expected).norm(dim=1) - tolerance * spread).median() <= 0:
            self.refuse("its logits differ when it is served in batches and chunks")

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Record and check one call; returns zeros, [1, tokens, heads, value_dim]."""
        layer = getattr(module, "layer_idx", None)
        expected = len(self.windows_tokens)
        if layer != expected or expected == len(self.kv_layout.layers):
            self.refuse(f"layer {layer} computed attention where {expected} was due")
        for name, argument in kwargs.items():
            known = name in _IMPLEMENTED_KWARGS or name in _UNRELATED_KWARGS
            if argument is not None and argument is not False and not known:
                self.refuse(f"its attention is given {name!r}, which is not implemented")
        if kwargs.get("is_causal") is False:
            self.refuse("its attention is not causal")
        windows = [window for known_mask, window in self.masks if known_mask is mask]
        if not windows:
            self.refuse("its attention does not use the mask that Transformers makes for it")
        tokens = query.shape[2]
        if query.shape[0] != 1 or not key.shape[2] == value.shape[2] == tokens:
            self.refuse("its attention has other keys than those of the tokens it is given")
        layer_kv = LayerKV(key.shape[1], key.shape[3], value.shape[3])
        if layer_kv != self.kv_layout.layers[layer] or value.shape[1] != key.shape[1]:
            self.refuse(
                f"layer {layer} has KV of {layer_kv}, and its configuration describes "
                f"{self.kv_layout.layers[layer]}"
            )
        dtypes = {query.dtype, key.dtype, value.dtype}
        if dtypes != {self.kv_layout.dtype}:
            self.refuse(
                f"its queries, keys and values are of {dtypes}, not all of {self.kv_layout.dtype}"
            )
        self.windows_tokens.append(windows[0])
        return value.new_zeros(1, tokens, query.shape[1], value.shape[3])

    def mask(self, allowed: Callable[..., torch.Tensor], device: torch.device) -> torch.Tensor:
        """Make a stand-in for the mask that `allowed(batch, head, query, key)` describes.

        Raises:
            UnsupportedModelError: it is neither causal nor causal within a window.
        """
        last = self.max_tokens - 1
        queries = torch.tensor([last // 2, max(last - 1, 0), last], device=device)[:, None]
        keys = torch.arange(self.max_tokens, device=device)
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        seen = allowed(zero, zero, queries[None, None], keys[None, None, None])
        seen = seen.broadcast_to(1, 1, len(queries), len(keys))[0, 0]
        window = int(seen[-1].sum())
        if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
            self.refuse("its attention mask is neither causal nor a sliding window")
        stand_in = torch.zeros(1, 1, 1, 1, device=device)
        self.masks.append((stand_in, window if window < self.max_tokens else None))
        return stand_in

    def refuse(self, reason: str) -> NoReturn:
        """Raise UnsupportedModelError."""
        raise UnsupportedModelError(self.architecture, reason)


_PROBING: ContextVar[_Probe] = ContextVar("aquifer_probe")


def _probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    return _PROBING.get().attention(module, query, key, value, attention_mask, kwargs), None


def _probe_mask(
    *, mask_function: Callable[..., torch.Tensor], device: torch.device, **_: Any
) -> torch.Tensor:
    return _PROBING.get().mask(mask_function, device)


AttentionInterface.register(_PROBE, _probe_attention)
AttentionMaskInterface.register(_PROBE, _probe_mask)


@contextmanager
def _implementations(model: Any, attention: str, experts: str) -> Iterator[None]:
    """Use other entries of the registries of attention and experts within the context."""
    # The public `set_attn_implementation` only warns for classes that it does not recognise, and
    # does not reach copies of the configuration in modules.
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        config._attn_implementation = attention
        config._experts_implementation = experts
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = SERVE
            config._experts_implementation = EXPERTS


def _arange(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids), device=ids.device)[None]
