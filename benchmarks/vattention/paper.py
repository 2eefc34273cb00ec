"""Figures of vAttention's evaluation (sections 5 to 7), as the result files have them beside ours.

Latencies of Table 2 are in microseconds, by page size in KiB. Table 2 gives the calls of CUDA for
pages of 2 MiB, and those of the paper's own driver for smaller ones, where mapping includes access
and releasing includes unmapping.
"""

from __future__ import annotations

from typing import Any

CALLS_US: dict[str, dict[int, float]] = {
    "reserve": {64: 18, 128: 17, 256: 16, 2048: 2},
    "create": {64: 1.7, 128: 2, 256: 2.1, 2048: 29},
    "map": {64: 8, 128: 8.5, 256: 9, 2048: 2},
    "set access": {2048: 38},
    "unmap": {2048: 34},
    "release": {64: 2, 128: 3, 256: 4, 2048: 23},
    "free": {64: 35, 128: 35, 256: 35, 2048: 1},
}
"""Table 2, one A100."""

BANDWIDTH_GB_PER_S: dict[str, dict[int, float]] = {
    "TP-1": {64: 7.59, 128: 14.56, 256: 27.04, 2048: 35.17},
    "TP-2": {64: 15.18, 128: 29.12, 256: 54.08, 2048: 70.34},
}
"""Table 7, physical memory allocated, by page size in KiB."""

MODELS: dict[str, dict[str, int]] = {
    "Yi-6B": {"num_heads": 32, "num_kv_heads": 4, "num_layers": 32, "devices": 1},
    "Llama-3-8B": {"num_heads": 32, "num_kv_heads": 8, "num_layers": 32, "devices": 2},
    "Yi-34B": {"num_heads": 56, "num_kv_heads": 8, "num_layers": 60, "devices": 2},
}
"""Table 4; heads have 128 elements."""

HEAD_DIM = 128

WASTE: dict[str, dict[int, dict[str, dict[int, float]]]] = {
    "Yi-6B": {
        1: {
            "tokens": {64: 64, 128: 128, 256: 256, 2048: 2048},
            "mib": {64: 4, 128: 8, 256: 16, 2048: 128},
        },
        2: {
            "tokens": {64: 128, 128: 256, 256: 512, 2048: 4096},
            "mib": {64: 8, 128: 16, 256: 32, 2048: 256},
        },
    },
    "Llama-3-8B": {
        1: {
            "tokens": {64: 32, 128: 64, 256: 128, 2048: 1024},
            "mib": {64: 4, 128: 8, 256: 16, 2048: 128},
        },
        2: {
            "tokens": {64: 64, 128: 128, 256: 256, 2048: 2048},
            "mib": {64: 8, 128: 16, 256: 32, 2048: 256},
        },
    },
    "Yi-34B": {
        1: {
            "tokens": {64: 32, 128: 64, 256: 128, 2048: 1024},
            "mib": {64: 7.5, 128: 15, 256: 30, 2048: 240},
        },
        2: {
            "tokens": {64: 64, 128: 128, 256: 256, 2048: 2048},
            "mib": {64: 15, 128: 30, 256: 60, 2048: 480},
        },
    },
}
"""Table 8: by model and degree of tensor parallelism, tokens of a page and most waste of a request,
by page size in KiB."""

OVERLAP = {
    "iterations": 2500,
    "batch": 32,
    "context_tokens": [4096, 8192],
    "spikes_ms": [5, 20],
    "overlapped": "spikes hidden",
}
"""Fig. 9 and section 6.4.1: Llama-3-8B, pages of 2 MiB."""

RECLAMATION = {"prompt_tokens": 16384, "sync_over_deferred": {"64 KiB": 1.15, "2 MiB": 1.03}}
"""Fig. 10 and section 6.4.2."""

PAGE_SIZES = {"effect": "none found between 64 KiB and 2 MiB"}
"""Fig. 11 and section 6.4.4."""

BATCH: dict[str, dict[int, int]] = {
    "Yi-6B": {64: 240, 2048: 187},
    "Llama-3-8B": {64: 258, 2048: 203},
    "Yi-34B": {64: 68, 2048: 56},
}
"""Fig. 12: the largest batch with OpenChat's lengths at 7 requests/s, by page size in KiB."""

PREFILL_S: dict[str, dict[int, dict[str, list[float]]]] = {
    "Yi-6B": {
        64: {"FA_Paged": [10.6, 7.0], "FA_vAttention": [9.1, 5.5], "FI_Paged": [10.9, 6.0]},
        128: {"FA_Paged": [37.9, 30.3], "FA_vAttention": [30.5, 23.1], "FI_Paged": [35.4, 25.4]},
        192: {"FA_Paged": [81.5, 70.0], "FA_vAttention": [64.6, 53.6], "FI_Paged": [73.0, 58.3]},
    },
    "Llama-3-8B": {
        64: {"FA_Paged": [6.0, 3.4], "FA_vAttention": [5.2, 2.7], "FI_Paged": [6.7, 3.0]},
        128: {"FA_Paged": [20.4, 15.4], "FA_vAttention": [16.8, 11.6], "FI_Paged": [20.3, 12.8]},
        192: {"FA_Paged": [43.3, 35.6], "FA_vAttention": [34.8, 26.9], "FI_Paged": [40.9, 29.7]},
    },
    "Yi-34B": {
        64: {"FA_Paged": [25.5, 13.2], "FA_vAttention": [22.8, 10.3], "FI_Paged": [26.0, 11.2]},
        128: {"FA_Paged": [82.8, 56.9], "FA_vAttention": [68.4, 43.2], "FI_Paged": [76.0, 46.7]},
        192: {
            "FA_Paged": [170.7, 131.8],
            "FA_vAttention": [136.9, 98.8],
            "FI_Paged": [148.8, 104.7],
        },
    },
}
"""Table 5: seconds of a prefill and of its attention, by context in units of 1024 tokens.
Llama-3-8B and Yi-34B ran on two A100s."""

DECODE_MS: dict[str, dict[int, dict[str, float]]] = {
    "Yi-6B": {
        16: {"vLLM": 32.3, "FA_Paged": 11.5, "FI_Paged": 15.2, "FA_vAttention": 11.3},
        32: {"vLLM": 64.1, "FA_Paged": 25.5, "FI_Paged": 25.4, "FA_vAttention": 25.3},
    },
    "Llama-3-8B": {
        16: {"vLLM": 17.8, "FA_Paged": 11.9, "FI_Paged": 12.1, "FA_vAttention": 11.8},
        32: {"vLLM": 35.3, "FA_Paged": 25.4, "FI_Paged": 23.23, "FA_vAttention": 25.3},
    },
    "Yi-34B": {
        12: {"vLLM": 41.4, "FA_Paged": 17.4, "FI_Paged": 24.1, "FA_vAttention": 17.4},
        16: {"vLLM": 55.1, "FA_Paged": 21.7, "FI_Paged": 28.8, "FA_vAttention": 21.8},
    },
}
"""Table 6: milliseconds of attention, all layers of one decode step, by batch; contexts of 16K."""

MAKESPAN: dict[str, Any] = {
    "requests": 50,
    "Llama-3-8B": {"FA_Paged over FA_vAttention, at most": 1.19},
    "Yi-6B": {"FA_Paged over FA_vAttention, at most": {"500": 1.22, "100": 1.16, "50": 1.13}},
    "Yi-34B": {"FA_Paged over FA_vAttention, at most": 1.16},
    "any": {"FI_Paged over FA_vAttention, at most": 1.29},
}
"""Fig. 8 and section 6.3."""
