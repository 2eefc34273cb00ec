"""Calls of CUDA's driver API: the context they need, and the errors that they return."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from aquifer.errors import DriverError


class CurrentContext:
    """Context manager that makes a CUDA context current in the calling thread; may be nested."""

    def __init__(self, api: Any, context: Any) -> None:
        self._api = api
        self._context = context

    def __enter__(self) -> None:
        checked(self._api, self._api.cuCtxPushCurrent(self._context), "could not enter the context")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        checked(self._api, self._api.cuCtxPopCurrent(), "could not leave the context")


def checked(api: Any, result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call that returned (code, *values).

    Raises:
        DriverError: the code is not success.
    """
    code, *values = result
    if code != api.CUresult.CUDA_SUCCESS:
        _, text = api.cuGetErrorString(code)
        reason = text.decode() if text else "unknown error"
        raise DriverError(code.name, f"{what} ({reason})")
    return values[0] if len(values) == 1 else tuple(values)


def text_of(name: bytes) -> str:
    """Decode a NUL-terminated name in a larger buffer."""
    return name.split(b"\0", 1)[0].decode()
