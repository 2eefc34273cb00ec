"""Sizes of all parts: those of the paper on a GPU, and small ones that a CPU runs in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KIB, MIB = 1 << 10, 1 << 20
SEED = 0

LLAMA_3_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 140_000,
    "tie_word_embeddings": False,
}
"""Llama-3-8B's shape, with a context as long as the longest request here."""

_SMALL_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of equal length: rows that decode, or a chunk of a prompt after other tokens."""

    batch: int
    tokens: int
    chunk_tokens: int = 1

    @property
    def name(self) -> str:
        """The shape in tables."""
        if self.chunk_tokens == 1:
            return f"decode {self.batch} x {self.tokens}"
        if self.chunk_tokens == self.tokens:
            return f"prefill {self.tokens}"
        return f"{self.chunk_tokens} after {self.tokens - self.chunk_tokens}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of all parts.

    Attributes:
        device: device of the engine, "cpu" or "cuda:N".
        config: config.json of the model.
        memory: budget of an engine's pool; None for the engine's own choice.
        page_bytes: page size of engines, and of kernels where the size does not vary.
        page_sizes: page sizes to compare, in bytes.
        num_calls: least number of measured calls.
        batch_pages: pages of a call that takes several.
        bandwidth_bytes: memory that a thread allocates in one measurement of bandwidth.
        repeats: repeats of a measurement.
        num_seqs: sequences of `overlap`.
        context_tokens: least and most tokens of their prompts.
        num_steps: their decode steps.
        reclaimed_tokens: prompt of `reclamation`.
        shapes: shapes of `page_sizes`.
        contexts: prompts of `prefill`.
        batches: batches of `decode`.
        decode_tokens: prompt of each of their sequences.
        decode_steps: their decode steps.
        makespan_contexts: prompt and output together of the requests of `makespan`.
        ratios: their prompt tokens by their output tokens.
        num_requests: how many there are.
        long_tokens: the longest prompt.
        one_row, chunk: shapes of `targets`.
        cached_tokens: prompt that is found in the prefix cache.
        shared: number of prompts, tokens that they share, and tokens of each.
        found: number of prompts that are all found, and tokens of each.
        trace: trace of `batch`; None if there is none.
        trace_requests: requests of it to replay.
        trace_rate: their arrivals, requests/s.
        limit_s: seconds after which a part begins no further measurement.
    """

    device: str
    config: Mapping[str, Any]
    memory: str | None
    page_bytes: int
    page_sizes: tuple[int, ...]
    num_calls: int
    batch_pages: int
    bandwidth_bytes: int
    repeats: int
    num_seqs: int
    context_tokens: tuple[int, int]
    num_steps: int
    reclaimed_tokens: int
    shapes: tuple[Shape, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    decode_tokens: int
    decode_steps: int
    makespan_contexts: tuple[int, ...]
    ratios: tuple[int, ...]
    num_requests: int
    long_tokens: int
    one_row: Shape
    chunk: Shape
    cached_tokens: int
    shared: tuple[int, int, int]
    found: tuple[int, int]
    trace: Path | None = None
    trace_requests: int = 3000
    trace_rate: float = 7.0
    limit_s: float = 240.0

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and elements of a head."""
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        heads, kv_heads, head_dim = (int(self.config[name]) for name in names)
        return heads, kv_heads, head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and KV."""
        dtype: torch.dtype = getattr(torch, self.config["dtype"])
        return dtype


def gpu(device: str = "cuda:0") -> Settings:
    """The paper's sizes, for a GPU with about 140 GB.

    Args:
        device: "cuda" or "cuda:N".
    """
    return Settings(
        device=device,
        config=LLAMA_3_8B,
        memory=None,
        page_bytes=2 * MIB,
        page_sizes=tuple(size * MIB for size in (2, 4, 16, 32, 64)),
        num_calls=500,
        batch_pages=16,
        bandwidth_bytes=8 << 30,
        repeats=10,
        num_seqs=32,
        context_tokens=(4096, 8192),
        num_steps=2500,
        reclaimed_tokens=16384,
        shapes=(
            Shape(1, 8192),
            Shape(16, 16384),
            Shape(64, 2048),
            Shape(1, 8192, 8192),
            Shape(1, 32768, 32768),
        ),
        contexts=(2048, 8192, 16384, 32768, 65536, 131072),
        batches=(1, 4, 8, 16, 32),
        decode_tokens=16384,
        decode_steps=100,
        makespan_contexts=(32768, 65536, 131072),
        ratios=(500, 100, 50),
        num_requests=4,
        long_tokens=131_000,
        one_row=Shape(1, 8192),
        chunk=Shape(1, 8192, 2048),
        cached_tokens=8192,
        shared=(8, 6000, 6500),
        found=(16, 16384),
    )


def small() -> Settings:
    """Sizes that a CPU runs in seconds: they show that the code runs, and nothing about speed."""
    return Settings(
        device="cpu",
        config={**LLAMA_3_8B, **_SMALL_MODEL},
        memory="32MiB",
        page_bytes=4 * KIB,
        page_sizes=(4 * KIB, 64 * KIB, 256 * KIB, 2 * MIB),
        num_calls=500,
        batch_pages=16,
        bandwidth_bytes=64 * MIB,
        repeats=3,
        num_seqs=4,
        context_tokens=(16, 64),
        num_steps=40,
        reclaimed_tokens=256,
        shapes=(Shape(1, 64), Shape(4, 32), Shape(1, 64, 64)),
        contexts=(32, 128),
        batches=(1, 4),
        decode_tokens=64,
        decode_steps=8,
        makespan_contexts=(128, 256),
        ratios=(50, 10),
        num_requests=3,
        long_tokens=512,
        one_row=Shape(1, 128),
        chunk=Shape(1, 128, 32),
        cached_tokens=128,
        shared=(4, 96, 120),
        found=(4, 128),
    )


def of_device(device: str) -> Settings:
    """The sizes for a device."""
    return small() if device == "cpu" else gpu(device)
