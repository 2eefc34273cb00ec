"""Models to serve, and the engine's options as one checked value: `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from aquifer.errors import ConfigError
from aquifer.options import OPTIONS, Option, default_of
from aquifer.sizes import format_size

__all__ = [
    "BUNDLED_MODELS",
    "EngineConfig",
    "ModelSpec",
    "check_fields",
    "field_values",
    "format_size",
]

BUNDLED_MODELS = {"demo": Path(__file__).parent / "bundled" / "demo"}
"""Models that come with the package, by the name that stands for their path."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve: the name clients use, and where its checkpoint is."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """From "PATH", "NAME=PATH" or the name of a bundled model; PATH alone names itself.

        Raises:
            ConfigError: name or path is empty.
        """
        name, separator, path = text.partition("=")
        if not separator:
            name = path = text
        if not name or not path:
            raise ConfigError(f"{text!r} names no model; write PATH or NAME=PATH")
        return cls(name, BUNDLED_MODELS.get(path, Path(path).expanduser()))

    def check_path(self) -> None:
        """Check that the path exists, which needs none of the packages that read a checkpoint.

        Raises:
            ConfigError: it does not.
        """
        if not self.path.exists():
            raise ConfigError(f"no such model: {self.path} does not exist")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's options: sizes in bytes, lengths in tokens.

    `OPTIONS` says what each field means, its default and its bounds.

    Raises:
        ConfigError: a value is not allowed, or two models have the same name.
    """

    models: tuple[ModelSpec, ...]
    device: str = default_of("device")
    load_format: str = default_of("load_format")
    dtype: str = default_of("dtype")
    threads: int | None = default_of("threads")
    memory_bytes: int | None = default_of("memory")
    gpu_memory_utilization: float = default_of("gpu_memory_utilization")
    page_bytes: int | None = default_of("page_size")
    kv_cache: str = default_of("kv_cache")
    block_size: int = default_of("block_size")
    max_model_len: int | None = default_of("max_model_len")
    max_num_seqs: int = default_of("max_num_seqs")
    max_num_batched_tokens: int | None = default_of("max_num_batched_tokens")
    max_num_waiting: int = default_of("max_num_waiting")
    enable_prefix_caching: bool = default_of("enable_prefix_caching")
    swap_space_bytes: int = default_of("swap_space")
    preemption_mode: Literal["auto", "swap", "recompute"] = default_of("preemption_mode")
    seed: int | None = default_of("seed")

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ConfigError(f"two models have the same name in {', '.join(names)}")
        check_fields(self)
        if self.preemption_mode == "swap" and self.swap_space_bytes == 0:
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
    """The options that are fields of a dataclass; models are made of text, and not among them."""
    names = {field.name for field in fields(kind)} - {"models"}
    return [option for option in OPTIONS if option.field_name in names]
