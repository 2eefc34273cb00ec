"""Restore: copy or recompute the KV of a preempted request (PagedAttention, 4.5 and 7.3)."""

from __future__ import annotations

from typing import Literal

RestoreMode = Literal["auto", "swap", "recompute"]


def restore_by_copy(mode: RestoreMode, swap_s: float, recompute_s: float) -> bool:
    """Whether to copy a victim's KV to the host, rather than compute it again later.

    Args:
        mode: "swap" or "recompute" to force one way, "auto" for the faster one.
        swap_s: seconds of the copies to the host and back.
        recompute_s: seconds of computing the KV again.
    """
    return mode == "swap" or (mode == "auto" and swap_s < recompute_s)
