"""Copies of small arrays to the device and back, without host synchronisation."""

from __future__ import annotations

from typing import Any

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


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to page-locked memory; complete once a fence made after this call has passed.

    On the host it is the tensor itself.
    """
    if tensor.device.type == "cpu":
        return tensor
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)
