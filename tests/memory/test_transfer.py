"""Small arrays that go to the device together."""

from __future__ import annotations

import numpy as np
import torch

from aquifer.memory.transfer import Uploads


def test_each_array_is_used_once_in_its_shape_and_in_order() -> None:
    uploads = Uploads(torch.device("cpu"))
    used: list[tuple[str, list[object]]] = []

    def use(name: str, tensor: torch.Tensor) -> None:
        used.append((name, tensor.tolist()))

    uploads.send()  # nothing was added
    uploads.add(np.arange(6).reshape(2, 3), lambda tensor: use("matrix", tensor))
    uploads.add(np.arange(12).reshape(3, 4)[:, 1:3], lambda tensor: use("columns", tensor))
    uploads.add(np.array([7]), lambda tensor: use("vector", tensor))
    assert used == []
    for _ in range(2):
        uploads.send()
    assert used == [
        ("matrix", [[0, 1, 2], [3, 4, 5]]),
        ("columns", [[1, 2], [5, 6], [9, 10]]),
        ("vector", [7]),
    ]
