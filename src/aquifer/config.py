"""Models to serve, and the engine's options as one checked value: `EngineConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from aquifer.errors import ConfigError
from aquifer.memory_options import OF_CACHES
from aquifer.option import Option
from aquifer.options import OPTIONS, default_of, find_option
from aquifer.sizes import format_size

__all__ = [
    "BUNDLED_MODELS",
    "EngineConfig",
    "ModelSpec",
    "aliases_of",
    "check_fields",
    "field_values",
    "format_size",
    "parse_models",
]

BUNDLED_MODELS = {"demo": Path(__file__).parent / "bundled" / "demo"}
"""Models that come with the package, by the name that stands for their path."""

GROUP_CACHES = ("virtual", "paged")
"""KV caches that a tensor-parallel group can have."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # ORG/NAME


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve: its names, and where its checkpoint is.

    Args:
        name: the served name, in answers, lists and metrics.
        path: the checkpoint.
        aliases: further names by which clients may ask for it.
        hub_id: ORG/NAME of the model on the Hugging Face hub, if the path does not exist.

    Raises:
        ConfigError: a name is empty.
    """

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    hub_id: str | None = None

    def __post_init__(self) -> None:
        if not all((self.name, *self.aliases)):  # owners without a model have the empty name
            raise ConfigError(f"the model at {self.path} has an empty name; give it another")

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """From "PATH" or "NAME=PATH", where PATH may be a bundled model's name or ORG/NAME.

        The name of PATH alone is PATH without slashes at its end; its last part and the text as it
        was written are aliases.

        Raises:
            ConfigError: name or path is empty.
        """
        name, separator, written = text.partition("=")
        if not separator:
            name = written = text
        if not name or not written:
            raise ConfigError(f"{text!r} names no model; write PATH or NAME=PATH")
        location = written.rstrip("/") or "/"
        path = BUNDLED_MODELS.get(location, Path(location).expanduser())
        hub_id = location if _HUB_ID.fullmatch(location) else None
        if separator:
            return cls(name, path, hub_id=hub_id)
        aliases = (Path(location).name, written)
        unique = tuple(alias for alias in dict.fromkeys(aliases) if alias not in ("", location))
        return cls(location, path, unique, hub_id)

    def check_path(self) -> None:
        """Check that the path exists, or that the model may be on the hub.

        That needs none of the packages that read a checkpoint.

        Raises:
            ConfigError: it does not, and cannot be.
        """
        if self.hub_id is not None:
            return
        try:
            exists = self.path.exists()
        except OSError as error:  # a name too long, or a folder that may not be looked into
            raise ConfigError(f"no such model: {self.path}: {error.strerror}") from error
        if not exists:
            raise ConfigError(
                f"no such model: {self.path} does not exist; give the path of a folder, ORG/NAME "
                "of the Hugging Face hub, or 'demo'"
            )


def parse_models(texts: Sequence[str], served_names: Sequence[str] = ()) -> tuple[ModelSpec, ...]:
    """Models from text, such as "PATH" and "NAME=PATH".

    A path may be a folder of models: each of its folders that has a config.json is one, with the
    folder's name.

    Args:
        texts: one for each model, or for each folder of models.
        served_names: names of the only model, in place of those that its path would give it. The
            first is its served name, the others are aliases.

    Raises:
        ConfigError: a text names no model; or names are given, and there are several models or the
            only one has a name.
    """
    models = tuple(model for text in texts for model in _models_of(text))
    if not served_names:
        return models
    if len(models) > 1:
        raise ConfigError(
            f"--served-model-name names one model, and there are {len(models)}; write NAME=PATH "
            "for each, or repeat the flag for several names of one model"
        )
    if "=" in texts[0]:
        raise ConfigError(
            f"{texts[0]!r} and --served-model-name both name the model; leave out one of them"
        )
    name, *aliases = dict.fromkeys(served_names)
    return (replace(models[0], name=name, aliases=tuple(aliases)),)


def _models_of(text: str) -> tuple[ModelSpec, ...]:
    """The model that a text names, or those of a folder of models.

    Raises:
        ConfigError: as `ModelSpec.parse`.
    """
    named = ModelSpec.parse(text)
    if "=" in text:  # a name is that of one model
        return (named,)
    try:
        if not named.path.is_dir() or (named.path / "config.json").exists():
            return (named,)
        folders = sorted(file.parent for file in named.path.glob("*/config.json"))
    except OSError:  # what is wrong with the path is said when it is opened
        return (named,)
    if not folders:
        return (named,)
    return tuple(ModelSpec(folder.name, folder, aliases=(str(folder),)) for folder in folders)


def aliases_of(models: Sequence[ModelSpec]) -> dict[str, str]:
    """The served name that each alias stands for.

    An alias that is another model's name, or that several models have, stands for none of them.
    """
    names = {model.name for model in models}
    found: dict[str, list[str]] = {}
    for model in models:
        for alias in model.aliases:
            found.setdefault(alias, []).append(model.name)
    return {
        alias: owners[0]
        for alias, owners in found.items()
        if len(owners) == 1 and alias not in names
    }


def _guards_by_environment() -> bool:
    """Value of `guard_pages` where none is given: that of its variable, also for `LLM`, so that any
    program can be run in this debug mode as it is.

    Raises:
        ConfigError: the variable is no truth value.
    """
    option = find_option("guard_pages")
    text = os.environ.get(option.variable)
    return bool(option.default if text is None else option.parse(text, option.variable))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's options: sizes in bytes, lengths in tokens.

    `OPTIONS` says what each field means, its default and its bounds. `neighbours` is no option: it
    is the folder in which the engine processes of a server find each other, to lend weights.

    Raises:
        ConfigError: a value is not allowed, or two models have the same name.
    """

    models: tuple[ModelSpec, ...]
    device: str = default_of("device")
    tensor_parallel_size: int = default_of("tensor_parallel_size")
    load_format: str = default_of("load_format")
    dtype: str = default_of("dtype")
    state_dtype: str = default_of("state_dtype")
    threads: int | None = default_of("threads")
    memory_bytes: int | None = default_of("memory")
    gpu_memory_utilization: float = default_of("gpu_memory_utilization")
    page_bytes: int | None = default_of("page_size")
    kv_layout: Literal["token-major", "layer-major"] = default_of("kv_layout")
    prompt_page_bytes: int | None = default_of("prompt_page_size")
    map_ahead: Literal["background", "step", "off"] | None = default_of("map_ahead")
    eager_pages: int = default_of("eager_pages")
    reclaim_below: float = default_of("reclaim_below")
    guard_pages: bool = field(default_factory=_guards_by_environment)
    kv_cache: str = default_of("kv_cache")
    bucket_routing_threshold: float = default_of("bucket_routing_threshold")
    bucket_inflation: float = default_of("bucket_inflation")
    bucket_grouping: bool = default_of("bucket_grouping")
    bucket_bounds: Literal["learned", "equal"] = default_of("bucket_bounds")
    bucket_memory_bytes: int | None = default_of("bucket_memory")
    block_size: int = default_of("block_size")
    max_model_len: int | None = default_of("max_model_len")
    max_num_seqs: int | None = default_of("max_num_seqs")
    max_num_batched_tokens: int | None = default_of("max_num_batched_tokens")
    max_prefill_ms: int | None = default_of("max_prefill_ms")
    max_num_waiting: int = default_of("max_num_waiting")
    max_share_by_key: float = default_of("max_share_by_key")
    express_share: float = default_of("express_share")
    enable_prefix_caching: bool = default_of("enable_prefix_caching")
    swap_space_bytes: int = default_of("swap_space")
    keep_alive_s: float | None = default_of("keep_alive")
    host_cache_bytes: int | None = default_of("host_cache")
    peer_weights: bool | None = default_of("peer_weights")
    preemption_mode: Literal["auto", "swap", "recompute"] = default_of("preemption_mode")
    length_prediction: str = default_of("length_prediction")
    prediction_uses: tuple[str, ...] = default_of("prediction_uses")
    seed: int | None = default_of("seed")
    neighbours: Path | None = None

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ConfigError(f"two models have the same name in {', '.join(names)}")
        check_fields(self)
        check_preemption(self.preemption_mode, self.swap_space_bytes)
        if self.prediction_uses and self.length_prediction == "off":
            raise ConfigError("prediction_uses needs length_prediction, such as prior")
        if self.kv_cache != "bucketed":
            self._check_without_buckets()
        if self.bucket_memory_bytes is not None and self.peer_weights:
            raise ConfigError(
                "peer_weights needs virtual memory, which is not used with bucket_memory; leave "
                "one of them out"
            )
        if self.bucket_memory_bytes is not None and self.guard_pages:
            raise ConfigError(
                "guard_pages needs virtual memory, which is not used with bucket_memory; leave out "
                "one of them"
            )
        if self.tensor_parallel_size > 1:
            self._check_group()

    def without_effect(self) -> list[str]:
        """Options that are set and that the KV cache has no use for, each with the reason."""
        found = [
            f"{name} has no effect with kv_cache {self.kv_cache}"
            for name, caches in OF_CACHES.items()
            if self.kv_cache not in caches
            and getattr(self, find_option(name).field_name) != default_of(name)
        ]
        is_layer_major = self.kv_cache == "virtual" and self.kv_layout == "layer-major"
        if is_layer_major and self.prompt_page_bytes is not None:
            found.append("prompt_page_size has no effect with kv_layout layer-major")
        return found

    def _check_without_buckets(self) -> None:
        """Refuse options of a cache that there is not."""
        for name, is_given in (
            *(
                (name, getattr(self, name) != default_of(name))
                for name in ("bucket_routing_threshold", "bucket_inflation")
            ),
            ("bucket_grouping", self.bucket_grouping),
            ("bucket_bounds equal", self.bucket_bounds == "equal"),
            ("bucket_memory", self.bucket_memory_bytes is not None),
        ):
            if is_given:
                raise ConfigError(
                    f"{name} needs kv_cache bucketed; kv_cache {self.kv_cache} has no buckets"
                )

    def _check_group(self) -> None:
        """Refuse what several devices for one model do not have."""
        if self.kv_cache not in GROUP_CACHES:
            raise ConfigError(
                f"kv_cache {self.kv_cache} is for one device; with tensor_parallel_size choose "
                + " or ".join(GROUP_CACHES)
            )
        if self.peer_weights:
            raise ConfigError(
                "peer_weights is for models on one device each; with tensor_parallel_size leave it "
                "out"
            )
        if self.host_cache_bytes:
            raise ConfigError(
                "host_cache keeps weights of one device; with tensor_parallel_size leave it out"
            )


def check_preemption(mode: str, swap_space_bytes: int) -> None:
    """Check that preempted requests can be restored in the way that is asked for.

    Raises:
        ConfigError: they are to be swapped, and there is no memory for them.
    """
    if mode == "swap" and swap_space_bytes == 0:
        raise ConfigError("preemption_mode swap needs swap_space above 0, such as 4GiB")


def check_fields(config: Any) -> None:
    """Check each field of a dataclass that an option describes.

    Raises:
        ConfigError: the option does not allow the value.
    """
    for option in _options_of_fields(type(config)):
        option.check(getattr(config, option.field_name))


def field_values(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options, by the fields of a dataclass that they are for.

    Args:
        kind: the dataclass; values of options that are no field of it are left out.
        values: by option name.
    """
    return {
        option.field_name: values[option.name]
        for option in _options_of_fields(kind)
        if option.name in values
    }


def _options_of_fields(kind: type) -> list[Option]:
    """The options that are fields of a dataclass, without those that make its models."""
    names = {each.name for each in fields(kind)} - {"models"}
    return [option for option in OPTIONS if option.field_name in names]
