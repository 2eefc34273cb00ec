"""Without a GPU, Triton's kernels are interpreted; it decides so when it is first imported."""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
