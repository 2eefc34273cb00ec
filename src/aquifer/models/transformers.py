"""Any decoder-only language model of Hugging Face Transformers, over our KV cache.

Transformers looks its attention up by name in a registry; one entry there is ours. All tokens of
a step run as one sequence of batch 1: everything but attention works token by token, and
attention goes to `KVView.attend`, which knows the sequences. Three steps make that safe:

    plan    refuse what the configuration or the modules show to be something else
    map     name, for each parameter, the stored tensors that fill it
    probe   run a few tokens through the loaded model in both ways; refuse what differs

The probe also reads each layer's sliding window out of the mask that the model asks for. That
mask is what its own attention obeys; the `sliding_window` argument is only a hint beside it.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from aquifer.cache.base import KVLayout, KVView, LayerKV
from aquifer.errors import AquiferError, ConfigError, UnsupportedModelError
from aquifer.models.base import ModelInput
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.store import Parameter, Source

_log = logging.getLogger(__name__)

_SERVE = "aquifer"  # has no entry in the mask registry, so that no masks are built
_PROBE = "aquifer-probe"  # has one
_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt"})  # without a field that says so
_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
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
_FOREIGN_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    StrictDataclassError,
)
"""What a model's own code raises when it is asked for something it cannot do."""

_PROBE_TOKENS = 6
# Relative error of a token's logits. Wide for 16 bits: rounding goes through all the layers, and a
# wrong mask, position or scale is off by far more.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_TOLERANCE_16_BITS = 0.25


class TransformersPlan:
    """A checkpoint of an architecture that Transformers implements.

    Args:
        checkpoint: an opened checkpoint, in the layout of the hub or of `save_pretrained`.
        dtype: of weights and KV; None means the configuration's own, or else the stored one.

    Raises:
        UnsupportedModelError: the architecture cannot be served, and why.
        ConfigError: the configuration is not sound, or a tensor is missing.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._architecture = _architecture(checkpoint)
        self._config = _load_config(checkpoint, self._architecture)
        _check_class(self._config, self._architecture)
        self._dtype = dtype or _own_dtype(self._config, checkpoint)
        self.max_model_len = _max_model_len(self._config, checkpoint)
        skeleton = _make_skeleton(self._config, self._dtype, self._architecture)
        _check_modules(skeleton, self._architecture)
        self._tied_names = _tied_names(skeleton)
        self.parameters = _map_parameters(
            skeleton, self._tied_names, checkpoint, self._architecture
        )

    def build(self, tensors: Mapping[str, torch.Tensor]) -> TransformersModel:
        """Make the model over loaded parameters, by name; it keeps references, no copies.

        Pre-condition: the parameters hold their values, for the probe compares results.

        Raises:
            UnsupportedModelError: the probe found that it cannot be served after all.
        """
        model = _make_skeleton(self._config, self._dtype, self._architecture)
        for parameter in self.parameters:
            for name in self._tied_names[parameter.name]:
                _set_tensor(model, name, tensors[parameter.name])
        device = next(iter(tensors.values())).device
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        probe = _Probe(model, self._architecture, device)
        return probe.run(self.max_model_len)


class TransformersModel:
    """A model of Transformers that keeps its KV with us. Made by `TransformersPlan.build`.

    Args:
        model: the model, parameters in place.
        kv_layout: what one token's KV looks like.
        windows_tokens: the sliding window of each layer, None where it attends to everything.
    """

    def __init__(
        self, model: Any, kv_layout: KVLayout, windows_tokens: tuple[int | None, ...]
    ) -> None:
        self.kv_layout = kv_layout
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._decoder = getattr(model, _decoder_name(model))
        self._head = _without_decoder(model)
        self._windows_tokens = windows_tokens

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden]; writes KV through `kv`."""
        token = _STEP.set(_Step(kv, self._windows_tokens))
        try:
            output = self._decoder(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
            )
        finally:
            _STEP.reset(token)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [n, hidden] -> [n, vocab_size], float32.

        Runs the model's own code beyond its decoder, with whatever scaling or capping it does.
        """
        output = type(self._head).forward(
            self._head, inputs_embeds=hidden[None], use_cache=False, return_dict=True
        )
        scores: torch.Tensor = output.logits[0]
        return scores.float()


# --- attention -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """What attention needs while one `forward` runs."""

    kv: KVView
    windows_tokens: Sequence[int | None]


_STEP: ContextVar[_Step] = ContextVar("aquifer_step")


def _serve_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, key_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, key_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it; returns [1, tokens, heads, value_dim]."""
    step = _STEP.get()
    attended = step.kv.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_tokens=step.windows_tokens[module.layer_idx],
        softcap=softcap,
    )
    return attended[None], None


AttentionInterface.register(_SERVE, _serve_attention)


class _DecoderOutput:
    """Hidden states, and None for whatever else a head passes on (losses of a router, caches)."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough(nn.Module):
    """Stands where the decoder was: what goes in as embeddings comes out as hidden states."""

    @property
    def decoder(self) -> _PassThrough:
        """Itself: OPT calls the decoder inside of its decoder."""
        return self

    def forward(self, *_args: None, inputs_embeds: torch.Tensor, **_: Any) -> _DecoderOutput:
        """What a decoder returns, around [1, n, hidden]."""
        return _DecoderOutput(inputs_embeds)


def _decoder_name(model: Any) -> str:
    """The child of a causal language model that turns token ids into hidden states."""
    embeddings = model.get_input_embeddings()
    children: Iterator[tuple[str, nn.Module]] = model.named_children()
    return next(name for name, child in children if embeddings in child.modules())


def _without_decoder(model: Any) -> Any:
    """The same model, sharing its head, with nothing where its decoder was."""
    head = copy.copy(model)
    head._modules = {**model._modules, _decoder_name(model): _PassThrough()}
    return head


# --- plan: what can be told without weights ------------------------------------------------


def _architecture(checkpoint: Checkpoint) -> str:
    """How the checkpoint names itself, for messages."""
    names = checkpoint.config.get("architectures")
    return str(names[0] if names else checkpoint.config.get("model_type"))


def _load_config(checkpoint: Checkpoint, architecture: str) -> Any:
    raw = checkpoint.config
    if raw.get("quantization_config"):
        raise UnsupportedModelError(architecture, "its weights are quantised")
    model_type = raw.get("model_type")
    if model_type is None:
        raise ConfigError(f"{checkpoint.path / 'config.json'} lacks model_type")
    if model_type not in CONFIG_MAPPING:
        custom = ", and code that comes with a checkpoint is never run" if "auto_map" in raw else ""
        raise UnsupportedModelError(
            architecture, f"this version of Transformers does not know {model_type!r}{custom}"
        )
    try:
        return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    except _FOREIGN_ERRORS as error:
        raise ConfigError(
            f"{checkpoint.path / 'config.json'} is no sound {model_type} configuration: {error}"
        ) from error


def _check_class(config: Any, architecture: str) -> None:
    """Refuse what the configuration and the model class show to be no plain decoder."""

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModelError(architecture, reason)

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if config.model_type in _ALIBI_MODEL_TYPES or getattr(config, "alibi", False):
        refuse("it adds a bias to attention (ALiBi)")
    if config.sub_configs or config.get_text_config() is not config:
        refuse("it is multimodal")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse("Transformers has no causal language model of it")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        refuse("it has layers that keep a recurrent state")
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    if others:
        refuse(f"it has layers of type {', '.join(sorted(others))}")
    if getattr(config, "attn_temperature_tuning", False):
        refuse("it scales attention by a token's row in the batch (attn_temperature_tuning)")
    if not getattr(model_class, "_supports_attention_backend", False):
        refuse("its code in Transformers does not let attention be replaced")


def _check_modules(model: Any, architecture: str) -> None:
    """Refuse what only the modules show."""
    for module in model.modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(architecture, "its attention is not causal")
    for name in model.state_dict():
        if re.search(r"(^|[._])sinks?($|[._])", name):
            raise UnsupportedModelError(architecture, "it uses attention sinks")


def _own_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    largest = max(checkpoint.tensors.values(), key=lambda stored: stored.num_bytes, default=None)
    return torch.float32 if largest is None else largest.dtype


def _max_model_len(config: Any, checkpoint: Checkpoint) -> int:
    """The longest context in which the rotary embedding does not depend on the batch.

    The "longrope" and "dynamic" scalings change with the longest position in a batch: one request
    would change the results of another. So contexts end where that would begin, for "longrope" at
    the original length, for "dynamic" at the configured one.
    """
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
    lengths = [getattr(config, name, None) for name in names]
    longest = next((int(length) for length in lengths if length), None)
    if longest is None:
        raise ConfigError(f"{checkpoint.path / 'config.json'} lacks max_position_embeddings")
    static = [
        int(rope["original_max_position_embeddings"])
        for rope in _rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    result = min([longest, *static])
    if result < longest:
        _log.warning(
            "%s: contexts are limited to %d of %d tokens, where its rotary scaling begins to "
            "depend on what else is in the batch",
            checkpoint.path,
            result,
            longest,
        )
    return result


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings: one for the model, or one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def _make_skeleton(config: Any, dtype: torch.dtype, architecture: str) -> Any:
    """The model with parameters that have no memory, and buffers with their true values.

    Construction happens on the meta device, so that no weight ever takes memory. Buffers are then
    made anew and filled by the model's own initialisation, as `from_pretrained` does it.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=_SERVE, dtype=dtype, trust_remote_code=False
            )
    except _FOREIGN_ERRORS as error:
        raise UnsupportedModelError(architecture, f"it cannot be constructed: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    model.initialize_weights()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # GPT-2 looks for padding in the ids to warn of it, which would wait for the device.
            module.warn_if_padding_and_no_attention_mask = _warn_of_nothing
        if hasattr(module, "rope_type"):
            # Contexts end where a scaling that looks at the batch would begin (_max_model_len):
            # there is nothing left to look for, and looking would wait for the device.
            module.rope_type = _static_rope_type(module.rope_type)
    return model.eval()


def _warn_of_nothing(input_ids: torch.Tensor, attention_mask: None) -> None:
    pass


def _static_rope_type(rope_type: Any) -> Any:
    if isinstance(rope_type, dict):
        return {layer: _static_rope_type(kind) for layer, kind in rope_type.items()}
    return "default" if rope_type == "longrope" or "dynamic" in rope_type else rope_type


def _set_tensor(model: Any, name: str, tensor: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    is_buffer = leaf in module._buffers
    setattr(module, leaf, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))


# --- map: from stored tensors to parameters ------------------------------------------------


def _tied_names(model: Any) -> dict[str, list[str]]:
    """All names of each parameter or persistent buffer, by the first one."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def _map_parameters(
    model: Any, tied_names: Mapping[str, Sequence[str]], checkpoint: Checkpoint, architecture: str
) -> tuple[Parameter, ...]:
    """For each parameter, the stored tensors that fill it. Other stored tensors are left alone."""
    state = model.state_dict(keep_vars=True)
    filled = _fill(model, state, checkpoint, architecture)
    exact_dtypes = model._get_dtype_plan(next(model.parameters()).dtype)
    parameters = []
    for name, aliases in tied_names.items():
        tensor = state[name]
        source_name = next((alias for alias in aliases if alias in filled), None)
        if source_name is None:
            if not tensor.is_meta:
                continue  # a buffer that has its value from the configuration
            raise ConfigError(
                f"{checkpoint.path} lacks the tensor {name!r}, which its config calls for"
            )
        if not tensor.is_floating_point():
            raise UnsupportedModelError(architecture, f"{name!r} holds {tensor.dtype}")
        exact = [dtype for part, dtype in exact_dtypes.items() if _contains(name, part)]
        parameters.append(
            Parameter(name, tuple(tensor.shape), (exact or [tensor.dtype])[0], filled[source_name])
        )
    return tuple(parameters)


def _contains(name: str, pattern: str) -> bool:
    """Whether a pattern of Transformers' dtype plan, where `*` stands for anything, fits."""
    return re.search(pattern.replace("*", ".*"), name) is not None


def _fill(
    model: Any, state: Mapping[str, torch.Tensor], checkpoint: Checkpoint, architecture: str
) -> dict[str, tuple[Source, ...]]:
    """What fills each name of the state, by the rules of Transformers' own loader.

    The same walk as its `convert_and_load_state_dict_in_model`: renamings, then at most one
    conversion, then the prefix of the base model added or removed.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    filled: dict[str, tuple[Source, ...]] = {}
    # To be converted: parameter -> pattern -> the stored tensors that match it, in natural order.
    collected: dict[str, dict[str, list[_Piece]]] = {}
    for stored_name in sorted(checkpoint.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(stored_name, renamings, converters, prefix, state)
        if name not in state and stored_name in state:
            name, pattern = stored_name, None
        if name not in state:
            continue
        if pattern is None:
            filled[name] = (Source(stored_name),)
        else:
            piece = _Piece(checkpoint.tensors[stored_name].shape, ((stored_name, ()),))
            collected.setdefault(name, {}).setdefault(pattern, []).append(piece)
    for name, pieces in collected.items():
        pattern = next(iter(pieces))
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        filled[name] = _convert(converter, pieces, name, state[name], architecture)
    return filled


_Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor that is yet to be: its shape, and where in it each stored tensor belongs."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, _Index], ...]


def _convert(
    converter: Any,
    collected: Mapping[str, list[_Piece]],
    name: str,
    parameter: torch.Tensor,
    architecture: str,
) -> tuple[Source, ...]:
    """Follow the operations on shapes alone.

    Raises:
        UnsupportedModelError: there is an operation that is no placement of whole stored tensors
            into contiguous parts of the parameter.
    """
    # In the order of the converter's patterns, which is the order of concatenation.
    lists = [collected[p] for p in converter.source_patterns if p in collected]
    for operation in converter.operations:
        if type(operation) is MergeModulelist and operation.dim == 0:
            lists = [[_stack(pieces, name)] for pieces in lists]
        elif type(operation) is Concatenate:
            every = [piece for pieces in lists for piece in pieces]
            lists = [[_concatenate(every, operation.dim, name)]]
        else:
            raise UnsupportedModelError(
                architecture, f"{name!r} is stored in another form ({operation!r})"
            )
    if len(lists) != 1 or len(lists[0]) != 1 or lists[0][0].shape != tuple(parameter.shape):
        raise ConfigError(
            f"the stored tensors for {name!r} do not add up to the shape {list(parameter.shape)}"
        )
    sources = tuple(Source(stored, index) for stored, index in lists[0][0].parts)
    if not all(parameter[source.index].is_contiguous() for source in sources):
        raise UnsupportedModelError(architecture, f"the parts of {name!r} are not contiguous")
    return sources


def _stack(pieces: Sequence[_Piece], name: str) -> _Piece:
    _check_equal([piece.shape for piece in pieces], name)
    parts = [
        (stored, (i, *index)) for i, piece in enumerate(pieces) for stored, index in piece.parts
    ]
    return _Piece((len(pieces), *pieces[0].shape), tuple(parts))


def _concatenate(pieces: Sequence[_Piece], dim: int, name: str) -> _Piece:
    _check_equal([piece.shape[:dim] + piece.shape[dim + 1 :] for piece in pieces], name)
    parts: list[tuple[str, _Index]] = []
    end = 0
    for piece in pieces:
        start, end = end, end + piece.shape[dim]
        for stored, index in piece.parts:
            inner = [*index, *[slice(None)] * (dim + 1 - len(index))]
            at = inner[dim]
            if isinstance(at, int):
                inner[dim] = start + at
            else:
                # The part is [at.start, at.stop) of the piece, the piece [start, end) of the whole.
                stop = piece.shape[dim] if at.stop is None else at.stop
                inner[dim] = slice(start + (at.start or 0), start + stop)
            parts.append((stored, tuple(inner)))
    shape = list(pieces[0].shape)
    shape[dim] = end
    return _Piece(tuple(shape), tuple(parts))


def _check_equal(shapes: Sequence[tuple[int, ...]], name: str) -> None:
    if len(set(shapes)) > 1:
        raise ConfigError(f"the stored tensors for {name!r} do not fit together: {set(shapes)}")


# --- probe: what only a run tells ----------------------------------------------------------


@dataclass(slots=True)
class _Probe:
    """Runs a few tokens to learn what attention is asked for, and that serving changes nothing."""

    model: Any
    architecture: str
    device: torch.device
    layers: list[LayerKV] = field(default_factory=list)
    windows_tokens: list[int | None] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    # Masks that the model was given, with the window that each one stands for.
    masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)
    max_tokens: int = 0

    def run(self, max_tokens: int) -> TransformersModel:
        """The model, ready to serve contexts of up to `max_tokens`."""
        self.max_tokens = max_tokens
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        num_tokens = min(_PROBE_TOKENS, max_tokens)
        ids = torch.arange(1, num_tokens + 1, device=self.device) * 7919 % vocab_size
        try:
            with torch.no_grad():
                self._record(ids)
                served = TransformersModel(
                    self.model,
                    KVLayout(tuple(self.layers), self._kv_dtype()),
                    tuple(self.windows_tokens),
                )
                self._compare(ids, served)
        except (AquiferError, torch.OutOfMemoryError):
            raise
        except _FOREIGN_ERRORS as error:
            raise UnsupportedModelError(self.architecture, f"its code failed: {error}") from error
        return served

    def _record(self, ids: torch.Tensor) -> None:
        token = _PROBING.set(self)
        try:
            with _attention(self.model, _PROBE):
                self.model(input_ids=ids[None], position_ids=_arange(ids), use_cache=False)
        finally:
            _PROBING.reset(token)
        if len(self.layers) != self.model.config.num_hidden_layers:
            self.refuse(
                f"attention was computed {len(self.layers)} times in "
                f"{self.model.config.num_hidden_layers} layers"
            )

    def _kv_dtype(self) -> torch.dtype:
        if len(self.dtypes) != 1:
            self.refuse(f"its queries, keys and values differ in dtype: {self.dtypes}")
        return next(iter(self.dtypes))

    def _compare(self, ids: torch.Tensor, served: TransformersModel) -> None:
        """Serve the tokens in two chunks, the second behind tokens of another sequence.

        Judged by the median over tokens: in 16 bits a mixture of experts may choose another
        expert on a tie, but what is wrong in principle is wrong in all of the second chunk.
        """
        with _attention(self.model, "eager"):
            expected = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        kv = _ProbeKV()
        first = len(ids) // 3  # tokens of the first chunk
        positions = _arange(ids)[0]
        kv.spans = [(0, first)]
        start = served.logits(served.forward(_input(ids[:first], positions[:first]), kv))
        other = first + 1  # tokens of the other sequence, so that no row equals its position
        kv.spans = [(1, other), (0, len(ids) - first)]
        batch = _input(
            torch.cat([ids.flip(0)[:other], ids[first:]]),
            torch.cat([positions[:other], positions[first:]]),
        )
        rest = served.logits(served.forward(batch, kv))[other:]
        actual = torch.cat([start, rest])
        if actual.shape[1] != served.vocab_size:
            self.refuse(f"its head gives {actual.shape[1]} scores for {served.vocab_size} tokens")
        spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
        tolerance = _TOLERANCE.get(self._kv_dtype(), _TOLERANCE_16_BITS)
        if not ((actual - expected).norm(dim=1) - tolerance * spread).median() <= 0:
            self.refuse("served in batches and chunks, it computes something else")

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Record one call; the result is zeros, [1, tokens, heads, value_dim]."""
        layer = getattr(module, "layer_idx", None)
        if layer != len(self.layers):
            self.refuse(f"layer {layer} computed attention where {len(self.layers)} was due")
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
            self.refuse("its attention sees other keys than the ones of its own tokens")
        self.layers.append(LayerKV(key.shape[1], key.shape[3], value.shape[3]))
        self.windows_tokens.append(windows[0])
        self.dtypes |= {query.dtype, key.dtype, value.dtype}
        return value.new_zeros(1, tokens, query.shape[1], value.shape[3])

    def mask(self, allowed: Callable[..., torch.Tensor], device: torch.device) -> torch.Tensor:
        """A stand-in for the mask that `allowed(batch, head, query, key)` describes.

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


class _ProbeKV:
    """KV of a few tokens in plain tensors. `spans` is set before each step: (sequence, tokens)."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._stored: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `KVView.attend`."""
        attended = []
        end = 0
        for sequence, count in self.spans:
            start, end = end, end + count
            keys, values = key[start:end], value[start:end]
            if (layer, sequence) in self._stored:
                past_keys, past_values = self._stored[layer, sequence]
                keys, values = torch.cat([past_keys, keys]), torch.cat([past_values, values])
            self._stored[layer, sequence] = keys, values
            attended.append(
                _attend_naively(query[start:end], keys, values, scale, window_tokens, softcap)
            )
        return torch.cat(attended)


def _attend_naively(
    query: torch.Tensor,  # [tokens, heads, key_dim], the last of the sequence
    keys: torch.Tensor,  # [length, kv_heads, key_dim]
    values: torch.Tensor,  # [length, kv_heads, value_dim]
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, 1).float()
    values = values.repeat_interleave(group, 1).float()
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(keys), device=keys.device)
    distance = at[-len(query) :, None] - at
    hidden = (distance < 0) | (distance >= (window_tokens or len(keys)))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Let the model use another entry of the attention registry for a while."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = _SERVE


def _arange(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids), device=ids.device)[None]


def _input(ids: torch.Tensor, positions: torch.Tensor) -> ModelInput:
    return ModelInput(ids, positions, positions + 1)
