"""The boundary to the device's virtual memory, and the registry of what implements it."""

from __future__ import annotations

from aquifer.errors import ConfigError
from aquifer.memory.driver.base import Driver


def open_driver(device: str) -> Driver:
    """Open the memory driver of `device`; the implementation is imported only when asked for.

    Args:
        device: "cpu".

    Raises:
        ConfigError: there is no driver for that device.
        DriverError: the device refused.
    """
    if device == "cpu":
        from aquifer.memory.driver.host import HostDriver

        return HostDriver()
    raise ConfigError(f"no memory driver for device {device!r}; the only one so far is 'cpu'")
