"""Map stored tensors to parameters by the rules of Transformers' own loader, on shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.weights.checkpoint import Checkpoint, are_equal
from aquifer.weights.parameters import Parameter, Source

Sources: TypeAlias = tuple[Source, ...]


def tied_names(model: Any) -> dict[str, list[str]]:
    """Names of each parameter or persistent buffer, keyed by the first of them."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def untie(
    names: Mapping[str, Sequence[str]], filled: Mapping[str, Sources], checkpoint: Checkpoint
) -> dict[str, list[str]]:
    """The same names, but where other tensors are stored under two names of a parameter, it is two.

    The tensors count more than the configuration, as in Transformers 5.

    Args:
        names: names of each parameter, keyed by the first of them.
        filled: what `find_sources` returned.
        checkpoint: the checkpoint with the stored tensors.
    """
    untied: dict[str, list[str]] = {}
    for name, aliases in names.items():
        kept = next((alias for alias in aliases if alias in filled), name)
        untied[name] = []
        for alias in aliases:
            is_same = alias not in filled or _are_equal(filled[kept], filled[alias], checkpoint)
            untied.setdefault(name if is_same else alias, []).append(alias)
    return untied


def _are_equal(first: Sources, second: Sources, checkpoint: Checkpoint) -> bool:
    pairs = list(zip(first, second, strict=False))
    return len(first) == len(second) and all(
        one.index == other.index
        and are_equal(checkpoint.tensors[one.name], checkpoint.tensors[other.name])
        for one, other in pairs
    )


def map_parameters(
    model: Any,
    names: Mapping[str, Sequence[str]],
    filled: Mapping[str, Sources],
    checkpoint: Checkpoint,
    architecture: str,
) -> tuple[Parameter, ...]:
    """Find the stored tensors that fill each parameter; other stored tensors are ignored.

    Args:
        model: the model, without weights.
        names: names of each parameter, keyed by the first of them.
        filled: what `find_sources` returned.
        checkpoint: the checkpoint with the stored tensors.
        architecture: for messages.

    Raises:
        UnsupportedModelError: a parameter holds no floating-point numbers.
        ConfigError: a tensor is missing.
    """
    state = model.state_dict(keep_vars=True)
    # Transformers has no public function for the parameters that it keeps in another dtype.
    exact_dtypes = model._get_dtype_plan(next(model.parameters()).dtype)
    parameters = []
    for name, aliases in names.items():
        tensor = state[name]
        source_name = next((alias for alias in aliases if alias in filled), None)
        if source_name is None:
            if not tensor.is_meta:
                continue  # a buffer whose value comes from the configuration
            if checkpoint.tensors:
                raise ConfigError(
                    f"{checkpoint.path} lacks the tensor {name!r}, which its config calls for"
                )
        if not tensor.is_floating_point():
            raise UnsupportedModelError(architecture, f"{name!r} holds {tensor.dtype}")
        exact = [dtype for part, dtype in exact_dtypes.items() if _contains(name, part)]
        sources = () if source_name is None else filled[source_name]
        parameters.append(
            Parameter(name, tuple(tensor.shape), (exact or [tensor.dtype])[0], sources)
        )
    return tuple(parameters)


def _contains(name: str, pattern: str) -> bool:
    """Whether a name contains a pattern of Transformers' dtype plan; `*` matches anything."""
    return re.search(pattern.replace("*", ".*"), name) is not None


def find_sources(model: Any, checkpoint: Checkpoint, architecture: str) -> dict[str, Sources]:
    """Find the sources of each name of the state by the rules of Transformers' own loader.

    The order is that of `convert_and_load_state_dict_in_model`: renamings, then at most one
    conversion, then the prefix of the base model is added or removed.

    Args:
        model: the model, without weights.
        checkpoint: the checkpoint with the stored tensors.
        architecture: for messages.

    Raises:
        UnsupportedModelError: a parameter is stored in a form that copying alone cannot convert.
        ConfigError: the stored tensors of a parameter do not fit together.
    """
    state = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    filled: dict[str, Sources] = {}
    # To convert: parameter -> pattern -> the stored tensors that match it, in natural order.
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
        label = f"{name!r} of {checkpoint.path}"
        filled[name] = _convert(converter, pieces, label, state[name], architecture)
    return filled


_Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Shape of an intermediate tensor, and the index in it of each stored tensor."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, _Index], ...]


def _convert(
    converter: Any,
    collected: Mapping[str, list[_Piece]],
    label: str,
    parameter: torch.Tensor,
    architecture: str,
) -> tuple[Source, ...]:
    """Apply a conversion to shapes alone.

    Raises:
        UnsupportedModelError: an operation is more than placing whole stored tensors into
            contiguous parts of the parameter.
    """
    # In the order of the converter's patterns, which is the order of concatenation.
    lists = [collected[p] for p in converter.source_patterns if p in collected]
    for operation in converter.operations:
        if type(operation) is MergeModulelist and operation.dim == 0:
            lists = [[_stack(pieces, label)] for pieces in lists]
        elif type(operation) is Concatenate:
            every = [piece for pieces in lists for piece in pieces]
            lists = [[_concatenate(every, operation.dim, label)]]
        else:
            raise UnsupportedModelError(
                architecture, f"{label} is stored in another form ({operation!r})"
            )
    if len(lists) != 1 or len(lists[0]) != 1 or lists[0][0].shape != tuple(parameter.shape):
        raise ConfigError(
            f"the stored tensors for {label} do not add up to the shape {list(parameter.shape)}"
        )
    sources = tuple(Source(stored, index) for stored, index in lists[0][0].parts)
    if not all(parameter[source.index].is_contiguous() for source in sources):
        raise UnsupportedModelError(architecture, f"the parts of {label} are not contiguous")
    return sources


def _stack(pieces: Sequence[_Piece], label: str) -> _Piece:
    _check_equal([piece.shape for piece in pieces], label)
    parts = [
        (stored, (i, *index)) for i, piece in enumerate(pieces) for stored, index in piece.parts
    ]
    return _Piece((len(pieces), *pieces[0].shape), tuple(parts))


def _concatenate(pieces: Sequence[_Piece], dim: int, label: str) -> _Piece:
    _check_equal([piece.shape[:dim] + piece.shape[dim + 1 :] for piece in pieces], label)
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


def _check_equal(shapes: Sequence[tuple[int, ...]], label: str) -> None:
    if len(set(shapes)) > 1:
        raise ConfigError(f"the stored tensors for {label} do not fit together: {set(shapes)}")
