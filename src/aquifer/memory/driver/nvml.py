"""GPU memory of this process as counted by NVML, NVIDIA's management library.

The package (`nvidia-ml-py`) is optional, and NVML does not always list this process: in a
container with its own PID namespace, older drivers list the host's PIDs; with MIG or MPS a process
may not be listed at all. Callers must handle a missing answer.
"""

from __future__ import annotations

import os
from typing import Any


class ProcessMemory:
    """Memory of this process on one GPU.

    Args:
        pci_bus_id: the GPU, such as "0000:1B:00.0"; CUDA's and NVML's indices may differ.
        api: replaces the module `pynvml` in tests.
    """

    def __init__(self, pci_bus_id: str, api: Any = None) -> None:
        self._pci_bus_id = pci_bus_id
        self._api = api
        self._device: Any = None
        self._is_missing = False

    def used_bytes(self) -> int | None:
        """All memory of this process there, pages included; None if NVML does not list it."""
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
        """Shut NVML down."""
        if self._device is not None:
            self._device = None
            self._api.nvmlShutdown()

    def _open(self) -> None:
        """Load NVML, which takes some milliseconds; tried once only."""
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
