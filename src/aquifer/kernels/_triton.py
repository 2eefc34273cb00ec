"""Triton where there is a GPU for it, and stand-ins elsewhere: the CPU engine does without it.

Importing Triton takes 50 MB, so it is not imported where nothing would run on it.

Kernels import `triton`, `tl`, `jit`, `tensor` and `constexpr` from here. Their parameters are
annotated `constexpr` where the value is compiled in, else `tensor`: the compiler looks annotations
up, and refuses names that are not Triton's own, such as `Any`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    triton: Any
    tl: Any
    constexpr: TypeAlias = Any
    tensor: TypeAlias = Any
elif torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
else:
    triton = tl = None
    constexpr = tensor = Any

interpret_on_cpu = False
"""Whether CPU tensors go through the kernels too, in Triton's interpreter; for tests, which must
set TRITON_INTERPRET=1 before anything imports Triton."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton, the function as it is, which is then never called."""
    return function if triton is None else triton.jit(function)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on that tensor is a kernel, rather than the reference."""
    return tensor.is_cuda or interpret_on_cpu
