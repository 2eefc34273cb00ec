"""Memory of one GPU that this process holds, as NVIDIA's management library counts it.

The package (`nvidia-ml-py`) is optional, and the figure is not always available: in a
container with its own process numbers, older drivers list the numbers of the host; with MIG or MPS
a process may not be listed at all. Callers have to do without an answer.
"""

from __future__ import annotations

import os
from typing import Any


class ProcessMemory:
    """The memory of this process on one GPU.

    Args:
        pci_bus_id: which GPU, such as "0000:1B:00.0"; numbers may differ from the library's.
        api: stands in for the module `pynvml`; for tests.
    """

    def __init__(self, pci_bus_id: str, api: Any = None) -> None:
        self._pci_bus_id = pci_bus_id
        self._api = api
        self._device: Any = None
        self._is_missing = False

    def used_bytes(self) -> int | None:
        """All that this process holds there, pages included; None if the library cannot tell."""
        if self._device is None and not self._is_missing:
            self._open()
        if self._device is None:
            return None
        try:
            processes = self._api.nvmlDeviceGetComputeRunningProcesses(self._device)
        except self._api.NVMLError:
            return None
        used = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        return int(used[0]) if used and used[0] else None

    def close(self) -> None:
        """Let go of the library."""
        if self._device is not None:
            self._device = None
            self._api.nvmlShutdown()

    def _open(self) -> None:
        """Load the library, which takes some milliseconds; once, whether or not that works."""
        self._is_missing = True
        if self._api is None:
            try:
                import pynvml
            except ImportError:
                return
            self._api = pynvml
        try:
            self._api.nvmlInit()
        except self._api.NVMLError:
            return
        try:
            self._device = self._api.nvmlDeviceGetHandleByPciBusId(self._pci_bus_id)
        except self._api.NVMLError:
            self._api.nvmlShutdown()
