"""Results as files: figures, every repeat, and the environment in which to repeat them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from aquifer.errors import ConfigError

_PACKAGES = ("aquifer", "torch", "triton", "cuda-bindings", "transformers", "numpy", "tokenizers")


def summarize(values: Sequence[float], percentiles: Sequence[float] = (99,)) -> dict[str, float]:
    """Return mean, median and percentiles, with the names of `vllm bench`: mean, median, p99."""
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        **{percentile_name(p): float(np.percentile(values, p)) for p in percentiles},
    }


def percentile_name(percentile: float) -> str:
    """The name of a percentile in results, such as p99 or p99.9."""
    return f"p{percentile:g}"


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "commit": commit(Path(__file__).parent),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu(),
        "load_average": os.getloadavg()[0],
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def gpu() -> dict[str, str | None] | None:
    """Name and driver of the GPU that torch uses; None where it uses none."""
    torch = sys.modules.get("torch")  # a measurement on a GPU has imported it
    if torch is None or not torch.cuda.is_initialized():
        return None
    driver = Path("/proc/driver/nvidia/version")
    return {
        "name": torch.cuda.get_device_name(),
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "cuda": torch.version.cuda,
    }


def gpus() -> list[str]:
    """Name and driver of each NVIDIA GPU of this machine, for a server in other processes."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.splitlines()


def check_writable(file: Path, flag: str) -> None:
    """Check that a file can be written, before a run whose result it gets; creates its folder.

    Raises:
        ConfigError: it cannot; the message names the flag.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            with file.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {file}: {error.strerror}") from error


def save(file: Path, figures: dict[str, Any], *, command: str | None = None) -> None:
    """Write figures and their environment as JSON; creates missing folders.

    Args:
        file: where to write.
        figures: what was measured.
        command: how to measure it again; None for the command line of this process.

    Raises:
        ConfigError: the file cannot be written.
    """
    described = environment() | ({} if command is None else {"command": command})
    content = {"environment": described, **figures}
    text = json.dumps(content, indent=2) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {file}: {error.strerror}") from error


def commit(folder: Path) -> str | None:
    """Return a checkout's commit, marked if it has changes; None outside a git tree."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "aquifer" if name == "__main__.py" else name


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
