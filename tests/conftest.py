"""What all tests share: an environment without options, Triton's interpreter without a GPU, and
tests that need a GPU.

Tests in tests/gpu, and tests and parameters marked `gpu`, are collected only where torch sees an
NVIDIA GPU. `--require-gpu` makes it an error if there is none, so that `make test-gpu` cannot pass
without them.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

HAS_GPU: bool = torch.cuda.is_available()
GPU_FOLDER = Path(__file__).parent / "gpu"

# The tests run with guard pages, but for those on a GPU, unless the environment says otherwise.
guard_pages = os.environ.get("AQUIFER_GUARD_PAGES", "false" if HAS_GPU else "true")

# The commands read their options from the environment too; the tests set those that they need.
for variable in [name for name in os.environ if name.startswith("AQUIFER_")]:
    del os.environ[variable]
os.environ["AQUIFER_GUARD_PAGES"] = guard_pages

# Python keeps what it has compiled, as in the Makefile: the tests start many processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Triton decides whether to interpret its kernels when it is first imported.
if not HAS_GPU and importlib.util.find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# New objects until the next garbage collection, of which full ones look at half a million imported
# objects: with Python's 700, a twentieth of the tests' time.
gc.set_threshold(20_000)

# No test depends on time: a busy machine may take any time for an example.
settings.register_profile("aquifer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("aquifer")


@pytest.fixture(scope="module")
def imports_left_out() -> Iterator[None]:
    """Leaves all that exists out of garbage collections, for tests in which there are full ones."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="end with an error if there is no NVIDIA GPU"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; not collected without one")
    if config.option.require_gpu and not HAS_GPU:
        raise pytest.UsageError("--require-gpu: torch sees no NVIDIA GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    deselected = [item for item in items if _needs_gpu(item)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not _needs_gpu(item)]


def _needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or item.path.is_relative_to(GPU_FOLDER)
