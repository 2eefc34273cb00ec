"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

_patched_modules: set[str] = set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of the test's tensors; on it, operations run their Triton kernels."""
    pytest.importorskip("triton")
    from aquifer.kernels import _triton

    if torch.cuda.is_available():
        return torch.device("cuda")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not isinstance(getattr(_triton.tl, "sum", None), interpreter.InterpretedFunction):
        pytest.skip("Triton was imported before TRITON_INTERPRET=1 was set")
    monkeypatch.setattr(_triton, "interpret_on_cpu", True)

    # Triton 3.6 makes a loop bound of an array with one element by `int(array)`, which NumPy 2.4
    # refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_for_numpy)

    # It patches the language anew for every call of a function within a kernel, which takes longer
    # than all else; once for each module is enough.
    patch_language = interpreter._patch_lang

    def call_patching_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in _patched_modules:
            patch_language(self.fn)
            _patched_modules.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_patching_once)
    return torch.device("cpu")
