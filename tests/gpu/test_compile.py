"""`aquifer compile` leaves nothing for a server to compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architectures import OUR_DECODER, save_tiny

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from aquifer.llm import LLM
with LLM(sys.argv[1], device="cuda", memory="8GiB") as llm:
    llm.generate([[1, 2, 3]] * 9, use_tqdm=False)
"""


def kernels(folder: Path) -> set[Path]:
    """What Triton has compiled, and NVRTC."""
    files = (file for suffix in ("cubin", "kernel") for file in folder.rglob(f"*.{suffix}"))
    return {file.relative_to(folder) for file in files}


def test_a_start_after_it_compiles_nothing(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    save_tiny(OUR_DECODER["qwen3"](), model)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    said = run("-m", "aquifer", "compile", str(model), "--memory", "8GiB")
    compiled = kernels(cache)
    assert compiled
    assert str(cache) in said
    run("-c", PROGRAM, str(model))
    assert kernels(cache) == compiled
