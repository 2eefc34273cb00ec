"""A small model on a small device, and configurations of replays on it."""

from __future__ import annotations

from dataclasses import replace

from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import DeviceModel, ModelShape, StepModel

MODEL = ModelShape.dense(
    "tiny",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=4,
    feed_forward_matrices=2,
    feed_forward=256,
    vocab_size=128,
    tied=True,
    max_tokens=256,
)
PAGE_BYTES = 4096  # eight tokens
DEVICE = DeviceModel("tiny", 8 << 20, 1e9, 1e11, 2e8, 1e-3, 1.0, 1.0)
STEPS = StepModel(MODEL, DEVICE)


def config_of(manager: str = "virtual", kv_pages: int = 200, **options: object) -> ReplayConfig:
    """A replay on a device with `kv_pages` pages for KV."""
    weight_pages = -(-MODEL.weight_bytes // PAGE_BYTES)
    config = ReplayConfig(
        {"tiny": MODEL},
        DEVICE,
        manager,
        memory_bytes=(weight_pages + kv_pages) * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        block_size=4,
        max_num_seqs=24,
        max_num_batched_tokens=64,
        swap_space_bytes=0,
    )
    return replace(config, **options)  # type: ignore[arg-type]
