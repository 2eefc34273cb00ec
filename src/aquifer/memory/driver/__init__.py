"""Virtual memory drivers: the `Driver` protocol, and the registry of its implementations."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aquifer.errors import ConfigError
from aquifer.memory.driver.base import Driver

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


def open_driver(device: str, *, is_plain: bool = False, exports: bool = False) -> Driver:
    """Open the memory driver of `device`; its implementation is imported here, on demand.

    Args:
        device: "cpu", "cuda" or "cuda:N"; "cuda" alone is the first GPU. "auto" is the first GPU
            if there is one and the CUDA bindings are installed, else "cpu".
        is_plain: whether to do without the device's virtual memory (`plain.py`).
        exports: whether other processes are to map its pages, as far as the device has that.

    Raises:
        ConfigError: there is no driver for that device, or its packages are not installed.
        DriverError: the device is missing, or refused a call.
    """
    if is_plain:
        from aquifer.memory.driver.plain import PlainDriver

        return PlainDriver(open_driver(device))
    if device == "auto":
        device = _choose()
    if device == "cpu":
        from aquifer.memory.driver.host import HostDriver

        return HostDriver()
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match:
        from aquifer.memory.driver.cuda import CudaDriver

        return CudaDriver(int(match[1] or 0), exports=exports)
    raise ConfigError(
        f"no memory driver for device {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'"
    )


def make_current(device: torch.device) -> None:
    """Make a GPU the one that the calling thread launches kernels on; the CPU needs nothing."""
    if device.type == "cuda":
        from torch import cuda

        cuda.set_device(device)


@contextmanager
def current_device_kept() -> Iterator[None]:
    """Make the GPU that is current in the calling thread current again at the end."""
    from torch import cuda

    if cuda.is_initialized():
        with cuda.device(cuda.current_device()):
            yield
    else:
        yield


def rank_devices(device: str, size: int) -> tuple[str, ...]:
    """The devices of a tensor-parallel group: the given one and those after it, by their numbers.

    Args:
        device: as for `open_driver`. Ranks on the CPU have the same one.
        size: number of ranks.

    Raises:
        ConfigError: there are not so many devices.
    """
    if device == "auto":
        device = _choose()
    if device == "cpu":
        return ("cpu",) * size
    import torch

    first = int(device.partition(":")[2] or 0)
    found = torch.cuda.device_count()
    if first + size > found:
        raise ConfigError(
            f"{size} devices from {device} on were asked for, and this machine has {found}; give a "
            "lower --tensor-parallel-size, or another --device"
        )
    return tuple(f"cuda:{number}" for number in range(first, first + size))


def _choose() -> str:
    """Return the device that "auto" selects on this machine."""
    import torch

    from aquifer.memory.driver import cuda

    if not torch.cuda.is_available():
        return "cpu"
    if not cuda.has_bindings():
        _log.warning(
            "torch sees a GPU, but the CUDA bindings are missing, so this runs on the CPU; "
            "pip install 'aquifer[cuda]' to use the GPU"
        )
        return "cpu"
    return "cuda"
