"""The boundary to the device's virtual memory, and the registry of what implements it."""

from __future__ import annotations

import re

from aquifer.errors import ConfigError
from aquifer.memory.driver.base import Driver


def open_driver(device: str) -> Driver:
    """Open the memory driver of `device`; the implementation is imported only when asked for.

    Args:
        device: "cpu", "cuda" or "cuda:N"; "cuda" alone is the first GPU.

    Raises:
        ConfigError: there is no driver for that device, or its packages are not installed.
        DriverError: the device is missing, or refused.
    """
    if device == "cpu":
        from aquifer.memory.driver.host import HostDriver

        return HostDriver()
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match:
        from aquifer.memory.driver.cuda import CudaDriver

        return CudaDriver(int(match[1] or 0))
    raise ConfigError(
        f"no memory driver for device {device!r}; there is 'cpu', 'cuda' and 'cuda:N'"
    )
