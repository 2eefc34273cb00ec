"""Time from the start of a process to its first token.

`python -m aquifer.bench.start MODEL OPTIONS` is that process; OPTIONS are those of `LLM`, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquifer.bench.result import gpu
from aquifer.errors import EngineError

_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Times of one start, in seconds."""

    import_s: float  # import of torch and the engine
    construct_s: float  # `LLM(...)`
    first_token_s: float  # generating one token for a short prompt
    process_s: float  # the whole process, including start and end of Python
    # Kernels in Triton's cache afterwards that were not there before: this start compiled them.
    num_compiled: int
    gpu: dict[str, str | None] | None  # the GPU that the process used


def measure_start(model: str, options: dict[str, Any]) -> StartTimes:
    """Start a process that generates one token and ends.

    Raises:
        EngineError: the process failed; its messages are on standard error.
    """
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    num_cached = _count(cache)
    command = [sys.executable, "-m", "aquifer.bench.start", model, json.dumps(options)]
    start = time.perf_counter()
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    process_s = time.perf_counter() - start
    if child.returncode:
        raise EngineError(f"the process that starts {model} failed with code {child.returncode}")
    times = json.loads(child.stdout.splitlines()[-1])
    return StartTimes(**times, process_s=process_s, num_compiled=_count(cache) - num_cached)


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def _start(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Body of the process; no heavy package has been imported before."""
    begun = time.perf_counter()
    from aquifer.engine.params import SamplingParams
    from aquifer.llm import LLM

    imported = time.perf_counter()
    with LLM(model, **options) as llm:
        constructed = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        llm.generate(list(range(1, _PROMPT_TOKENS + 1)), params, use_tqdm=False)
        answered = time.perf_counter()
        used = gpu()
    return {
        "import_s": imported - begun,
        "construct_s": constructed - imported,
        "first_token_s": answered - constructed,
        "gpu": used,
    }


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1], json.loads(sys.argv[2]))))
