"""Plot of a comparison of replays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from aquifer.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes

    from aquifer.bench.replay import Run

MEMORY_PARTS = {
    "written": "token states",
    "future": "reserved",
    "internal": "internal",
    "external": "external",
    "retained": "prefixes",
    "free": "free",
    "weights": "weights",
}
"""Names in Fig. 2 of the parts of KV memory; there, free memory counts as external. Weights are a
part where they come and go."""

_LOOKS = (("-", "o", 9), ("--", "s", 6), ("-.", "^", 6), (":", "v", 6), ("-", "D", 4))
"""Line style, marker and its size of each manager in turn. Lines of equal values both show: one is
solid with the larger marker, the other broken."""


def check_plot(file: Path) -> None:
    """Check that a plot can be made, before the runs that it shows.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the file's format.
    """
    pyplot = _pyplot()
    figure = pyplot.figure()
    formats = sorted(figure.canvas.get_supported_filetypes())
    pyplot.close(figure)
    if file.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"--plot is {file}; its format must be one of {', '.join(formats)}, such as out.png"
        )


def plot(runs: Sequence[Run], file: Path, title: str) -> None:
    """Plot latency and batched requests by rate, and the parts of memory at the highest rate.

    Raises:
        ConfigError: see `check_plot`; or the file cannot be written.
    """
    check_plot(file)
    pyplot = _pyplot()
    managers = list(dict.fromkeys(run.manager for run in runs))
    figure, (latency, batched, memory) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    for manager, (style, marker, size) in zip(managers, cycle(_LOOKS), strict=False):
        line = [run for run in runs if run.manager == manager and run.rate is not None]
        rates = [run.rate for run in line]
        look = {"ls": style, "marker": marker, "ms": size, "mfc": "none", "label": manager}
        latency.plot(rates, [run.result.normalized_latency_s for run in line], **look)
        batched.plot(rates, [run.result.averages["requests"] for run in line], **look)
    latency.set(xlabel="requests/s", ylabel="normalized latency, s/token", yscale="log")
    batched.set(xlabel="requests/s", ylabel="requests batched, mean", ylim=(0, None))
    if any(run.rate is not None for run in runs):
        latency.legend()
    plot_memory(memory, [[run for run in runs if run.manager == name][-1] for name in managers])
    figure.suptitle(title)
    figure.tight_layout()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {file}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def plot_memory(axes: Axes, runs: Sequence[Run]) -> None:
    """Plot the parts of memory of each run as a bar, in percent."""
    managers = [run.manager for run in runs]
    bottom = [0.0] * len(runs)
    for part, name in MEMORY_PARTS.items():
        if part == "weights" and not any(run.result.averages[part] for run in runs):
            continue
        heights = [100 * r.result.averages[part] / r.result.kv_budget_bytes for r in runs]
        axes.bar(managers, heights, bottom=bottom, label=name)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel="memory for KV, %")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _pyplot() -> ModuleType:
    """`matplotlib.pyplot`, drawing to files alone."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'aquifer[plots]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
