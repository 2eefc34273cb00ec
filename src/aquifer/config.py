"""Every option of the engine: one table, with default and unit."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from aquifer.errors import ConfigError

_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

BUNDLED_MODELS = {"demo": Path(__file__).parent / "bundled" / "demo"}
"""Models that come with the package, by the name that stands for their path."""


def parse_size(text: str | int) -> int:
    """Bytes from "32K", "4G", "4GiB", "1.5 GB" or a plain number; all units are powers of 1024.

    Raises:
        ConfigError: it is no size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write it like 512M, 4G or 4GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def format_size(num_bytes: float) -> str:
    """Bytes for people: "4.00 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


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


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's options. Sizes are in bytes, lengths in tokens.

    Args:
        models: what to serve, all from one pool.
        device: "cpu", "cuda" (the first GPU), "cuda:N", or "auto" for a GPU where there is one and
            its packages are installed, and else the CPU.
        load_format: "auto" to read the checkpoint's weights, or "dummy" for random ones, which need
            no more than its config.json.
        dtype: "auto" for the checkpoint's own, or "float32", "bfloat16", "float16".
        memory_bytes: the pool's whole budget, weights included, and on a GPU all else that the
            process holds there. None for a part of the GPU, or on the CPU for the weights plus a
            quarter of the memory that is free at the start.
        gpu_memory_utilization: that part of the GPU's whole memory, above 0 and up to 1; without
            effect on the CPU or beside `memory_bytes`.
        page_bytes: size of a physical page; None for the driver's default, doubled until the
            budget is no more pages than the system lets a process map.
        kv_cache: "virtual" or "paged".
        block_size: tokens of a block of the paged cache.
        max_model_len: longest context; None for what each model allows.
        max_num_seqs: sequences of one model that run at once.
        max_num_batched_tokens: tokens of one step, prompts and outputs together; None for 2048 on
            the CPU and 8192 on a GPU.
        max_num_waiting: requests that may wait before new ones are refused with "queue full".
        enable_prefix_caching: keep the KV of prompts and outputs for later requests that begin
            with the same tokens, as long as nobody needs the memory.
        prefix_cache_salt_by_key: over HTTP, let requests find only prefixes of requests that came
            with the same API key.
        swap_space_bytes: host memory for the KV of sequences that were preempted; 0 for none.
        preemption_mode: what becomes of a preempted sequence's KV: "swap" to copy it to the host,
            "recompute" to forget it and compute it again, "auto" for the cheaper one each time.
        seed: for requests that bring none; None for a different one each start.
    """

    models: tuple[ModelSpec, ...]
    device: str = "auto"
    load_format: str = "auto"
    dtype: str = "auto"
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    page_bytes: int | None = None
    kv_cache: str = "virtual"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    prefix_cache_salt_by_key: bool = False
    swap_space_bytes: int = 4 << 30
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no model given")
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ConfigError(f"two models have the same name in {', '.join(names)}")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "seed" or isinstance(value, bool) or not isinstance(value, int):
                continue
            least = 0 if option.name == "swap_space_bytes" else 1
            if value < least:
                raise ConfigError(f"{option.name} is {value}; it must be at least {least}")
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device is {self.device!r}; choose auto, cpu, cuda or cuda:N")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and "
                "at most 1"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format is {self.load_format!r}; choose auto or dummy")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}; choose auto, float32, bfloat16 or float16")
        if self.preemption_mode not in ("auto", "swap", "recompute"):
            raise ConfigError(
                f"preemption_mode is {self.preemption_mode!r}; choose auto, swap or recompute"
            )
        if self.preemption_mode == "swap" and self.swap_space_bytes == 0:
            raise ConfigError("preemption_mode swap needs swap_space above 0, such as 4GiB")
