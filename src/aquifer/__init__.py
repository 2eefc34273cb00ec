"""Aquifer serves language models from one pool of memory.

    from aquifer import LLM, SamplingParams

    with LLM("path/to/checkpoint") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are imported when they are first used, so that `import aquifer` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aquifer.errors import (
    AquiferError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    DriverError,
    EngineError,
    GroupError,
    InvariantError,
    LimitError,
    MalformedBodyError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from aquifer.engine.outputs import CompletionOutput, RequestOutput
    from aquifer.engine.params import BeamSearchParams, SamplingParams
    from aquifer.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AquiferError",
    "BeamSearchParams",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "DriverError",
    "EngineError",
    "GroupError",
    "InvariantError",
    "LimitError",
    "MalformedBodyError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedModelError",
    "__version__",
]

_LAZY = {
    "LLM": "aquifer.llm",
    "BeamSearchParams": "aquifer.engine.params",
    "CompletionOutput": "aquifer.engine.outputs",
    "RequestOutput": "aquifer.engine.outputs",
    "SamplingParams": "aquifer.engine.params",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
