"""Triton's interpreter, as the tests use it: in a third of its time, with the same results.

For each operation it makes types and shapes, of which there are few, and computes whether integers
overflow, which it then ignores.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

_patched_modules: set[str] = set()


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton kernels on the CPU, in the interpreter."""
    from aquifer.kernels import _triton

    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not isinstance(getattr(_triton.tl, "sum", None), interpreter.InterpretedFunction):
        pytest.skip("Triton was imported before TRITON_INTERPRET=1 was set")
    monkeypatch.setattr(_triton, "interpret_on_cpu", True)
    _suit_numpy(monkeypatch, interpreter)
    _patch_modules_once(monkeypatch, interpreter)
    _remember_types(monkeypatch, interpreter)


def _suit_numpy(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Triton 3.6 makes a loop bound of an array with one element by `int(array)`, which NumPy 2.4
    refuses."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_for_numpy)


def _patch_modules_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Triton patches the language anew for every call of a function within a kernel, which takes
    longer than all else; once for each module is enough."""
    patch_language = interpreter._patch_lang

    def call_patching_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in _patched_modules:
            patch_language(self.fn)
            _patched_modules.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_patching_once)


def _remember_types(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Make types and shapes once, and leave out the check for overflows."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # with it, the check would have a result
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    numpy_dtype = _numpy_dtypes(interpreter._get_np_dtype)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    monkeypatch.setattr(semantic, "computation_type_impl", cache(semantic.computation_type_impl))
    begin_type, begin_tensor, with_element = _with_known_shapes(core)
    monkeypatch.setattr(core.block_type, "__init__", begin_type)
    monkeypatch.setattr(core.tensor, "__init__", begin_tensor)
    monkeypatch.setattr(core.block_type, "with_element_ty", with_element)


def _numpy_dtypes(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that returns NumPy's dtype of a type's elements."""
    found: dict[str, Any] = {}

    def numpy_dtype(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return numpy_dtype


def _with_known_shapes(core: Any) -> tuple[Callable[..., Any], ...]:
    """Constructors of a block's type and of a tensor, for shapes that are checked once, and the
    method that returns a block's type with other elements."""

    @cache
    def known(shape: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
        """The shape and the number of elements of a type, and of a tensor."""
        constants = core.tuple([core.constexpr(size) for size in shape])
        num_elements = core.validate_block_shape(shape) if shape else 1
        return core.tuple(shape), num_elements, constants, core.constexpr(num_elements)

    types: dict[tuple[str, tuple[int, ...]], Any] = {}  # by the name of their elements

    def begin_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size if isinstance(size, int) else size.value for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.sizes = sizes
        self.shape, self.numel, _, _ = known(sizes)
        self.name = f"<{sizes}, {element_ty}>"

    def begin_tensor(self: Any, handle: Any, of: Any) -> None:
        self.handle = handle
        self.type = of
        self.dtype = of.scalar
        _, _, self.shape, self.numel = known(of.sizes if of.is_block() else ())

    def with_element(self: Any, scalar_ty: Any) -> Any:
        key = scalar_ty.name, self.sizes
        if key not in types:
            types[key] = core.block_type(scalar_ty, self.sizes)
        return types[key]

    return begin_type, begin_tensor, with_element
