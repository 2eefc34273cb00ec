"""The boundary to the device's virtual memory, and the registry of what implements it."""

from __future__ import annotations

import logging
import re

from aquifer.errors import ConfigError
from aquifer.memory.driver.base import Driver

_log = logging.getLogger(__name__)


def open_driver(device: str) -> Driver:
    """Open the memory driver of `device`; the implementation is imported only when asked for.

    Args:
        device: "cpu", "cuda" or "cuda:N"; "cuda" alone is the first GPU. "auto" is that one too,
            where there is one and the packages to drive it are installed, and else "cpu".

    Raises:
        ConfigError: there is no driver for that device, or its packages are not installed.
        DriverError: the device is missing, or refused.
    """
    if device == "auto":
        device = _choose()
    if device == "cpu":
        from aquifer.memory.driver.host import HostDriver

        return HostDriver()
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match:
        from aquifer.memory.driver.cuda import CudaDriver

        return CudaDriver(int(match[1] or 0))
    raise ConfigError(
        f"no memory driver for device {device!r}; there is 'auto', 'cpu', 'cuda' and 'cuda:N'"
    )


def _choose() -> str:
    """What "auto" stands for on this machine."""
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
