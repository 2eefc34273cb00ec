"""Copies of small arrays to the device and back, without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a tensor on the device, in the order of the current stream.

    On the host it shares the array's memory. For a device it goes through page-locked memory,
    which torch uses again only once the copy is done, so the caller may overwrite the array.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(target: torch.Tensor, array: npt.NDArray[Any]) -> None:
    """Copy an array to a tensor of its shape on a device, like `upload`."""
    target.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


class Uploads:
    """Small arrays that go to a device together, with one copy, and what is done with them there.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._added: list[tuple[npt.NDArray[np.int64], Callable[[torch.Tensor], object]]] = []

    def add(self, array: npt.NDArray[np.int64], use: Callable[[torch.Tensor], object]) -> None:
        """Copy an array with the next `send`, which then calls `use` with the tensor."""
        self._added.append((array, use))

    def send(self) -> None:
        """Copy all arrays that were added, and use them in the order in which they were added."""
        if not self._added:
            return
        added, self._added = self._added, []
        packed = upload(np.concatenate([array.ravel() for array, _ in added]), self._device)
        parts = packed.split([array.size for array, _ in added])
        for (array, use), part in zip(added, parts, strict=True):
            use(part.view(array.shape))


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to page-locked memory; complete once a fence made after this call has passed.

    On the host it is the tensor itself.
    """
    if tensor.device.type == "cpu":
        return tensor
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)
