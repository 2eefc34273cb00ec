"""The tiny models' checkpoints, requests to them, and engines that serve them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.engine.life import (
    BehindDriver,
    Case,
    LoopDriver,
    Open,
    World,
    make_cases,
)
from tests.models.tiny import TINY_MODELS

from aquifer.memory.driver.host import HostDriver

PLENTY_BYTES = 8 << 20


@pytest.fixture(scope="session")
def cases() -> dict[str, list[Case]]:
    return {name: make_cases(tiny, seed) for seed, (name, tiny) in enumerate(TINY_MODELS.items())}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the four models, and one of which a tensor is missing."""
    folder = tmp_path_factory.mktemp("models")
    for name, tiny in TINY_MODELS.items():
        tiny.save(folder / name)
    file = TINY_MODELS["llama"].save(folder / "broken") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    return folder


@pytest.fixture(scope="session")
def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes of each model's weights in pages, and of a token's KV."""
    models = {name: name for name in TINY_MODELS}
    world = World(folder, PLENTY_BYTES, LoopDriver(HostDriver()), models=models)
    infos = world.engine.models.items()
    sizes = {name: (info.weight_bytes, info.kv_bytes_per_token) for name, info in infos}
    world.close()
    world.driver.close()
    return sizes


@pytest.fixture
def open_world(folder: Path) -> Iterator[Open]:
    """Opens an engine; when the test is over, it is closed and the driver must have all back."""
    worlds: list[World] = []

    def open_it(
        memory_bytes: int = PLENTY_BYTES,
        *,
        is_behind: bool = False,
        device: HostDriver | None = None,
        **options: Any,
    ) -> World:
        driver = LoopDriver(device or (BehindDriver() if is_behind else HostDriver()))
        world = World(folder, memory_bytes, driver, **options)
        worlds.append(world)
        return world

    yield open_it
    for world in worlds:
        world.close()
        assert world.driver.is_unused
        world.driver.close()
