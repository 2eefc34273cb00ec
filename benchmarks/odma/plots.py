"""Plots of the figures, drawn from the JSON files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Content = Mapping[str, Any]

PAPER_UTILISATION = {"Alpaca": (0.5505, 0.7245), "Google-NQ": (0.4254, 0.6179)}
"""Memory utilisation by data set: with static pre-allocation, and with ODMA (section 5.2)."""

PAPER_GAIN = {"Alpaca": 0.23, "Google-NQ": 0.27}
"""Tokens per second of ODMA more than those of static pre-allocation."""

_COLOURS = ("#999999", "#1f77b4", "#111111", "#ff9f40", "#d62728", "#9467bd", "#2ca02c")
_DPI = 90


def draw(content: Content, file: Path) -> None:
    """Draw the plot of a part, if it has one."""
    drawing = _DRAWINGS.get(content["part"])
    if drawing is not None:
        drawing(content, file)


def _bars(axes: Axes, groups: list[str], series: Mapping[str, list[float]]) -> None:
    """A group of bars for each of `groups`, with a bar of each series."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = np.arange(len(groups)) + (number - (len(series) - 1) / 2) * width
        axes.bar(places, values, width, label=name, color=_COLOURS[number % len(_COLOURS)])
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.spines[["top", "right"]].set_visible(False)


def _pressure(content: Content, file: Path) -> None:
    shares = list(dict.fromkeys(row["memory_share"] for row in content["rows"]))
    ways = list(dict.fromkeys(row["way"] for row in content["rows"]))
    groups = [f"{share:.0%}" for share in shares]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")

    def series(value: Callable[[Content], float]) -> dict[str, list[float]]:
        return {way: [value(row) for row in content["rows"] if row["way"] == way] for way in ways}

    _bars(left, groups, series(lambda row: row["preemptions"]))
    left.set_ylabel("preemptions")
    _bars(right, groups, series(lambda row: row["goodput"][-1]))
    ttft_s, tpot_s = content["good_bounds_s"][-1]
    right.set_ylabel(f"requests/s, TTFT ≤ {ttft_s:g} s and TPOT ≤ {1e3 * tpot_s:g} ms")
    for axes in (left, right):
        axes.set_xlabel("memory for KV, of what is used where it is plentiful")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _served(content: Content, file: Path) -> None:
    rows = [row for row in content["rows"] if row["way"] != "plenty"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    _bars(left, [""], {row["way"]: [row["preemptions"]] for row in rows})
    left.set_ylabel("preemptions")
    groups = [f"TTFT ≤ {1e3 * ttft_s:.0f} ms" for ttft_s, _ in content["good_bounds_s"]]
    _bars(right, groups, {row["way"]: row["goodput"] for row in content["rows"]})
    tpot_s = content["good_bounds_s"][0][1]
    right.set_ylabel(f"requests/s within the TTFT and {1e3 * tpot_s:.1f} ms a token")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _utilisation(content: Content, file: Path) -> None:
    sources = list(dict.fromkeys(row["source"] for row in content["rows"]))
    every = [row["way"] for row in content["rows"]]
    ways = [way for way in dict.fromkeys(every) if every.count(way) == len(sources)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axes, name, label in (
        (left, "utilisation", "memory for KV that holds tokens, %"),
        (right, "tokens_per_s", "output tokens/s"),
    ):
        scale = 100 if name == "utilisation" else 1
        _bars(
            axes,
            sources,
            {
                way: [scale * row[name] for row in content["rows"] if row["way"] == way]
                for way in ways
            },
        )
        axes.set_ylabel(label)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _drift(content: Content, file: Path) -> None:
    window = content["window_requests"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5), layout="constrained", sharex=True, height_ratios=(1, 2)
    )
    outputs = content["mean_outputs"]
    top.plot(window * np.arange(len(outputs)), outputs, color="#111111")
    top.set_ylabel("output tokens, mean")
    for number, row in enumerate(content["rows"]):
        places = window * np.arange(len(row["windows"]))
        bottom.plot(places, row["windows"], label=row["way"], color=_COLOURS[number])
    bottom.set_ylabel("mean TTFT, s")
    bottom.set_yscale("log")
    bottom.set_xlabel("requests that have arrived")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        for place in content["shifts_at"]:
            axes.axvline(place, color="#cccccc", zorder=0)
    bottom.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _accuracy(content: Content, file: Path) -> None:
    """Share that fits beside what is given for it."""
    rows = [row for row in content["rows"] if "accuracy" in row]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for way, marker in zip(ways, "sxo^v", strict=True):
        for source, colour in zip(sources, _COLOURS, strict=False):
            (row,) = (row for row in rows if (row["source"], row["way"]) == (source, way))
            place = (row["given_over_needed"], 100 * row["accuracy"])
            axes.plot(*place, marker, color=colour, fillstyle="none")
    for source, colour in zip(sources, _COLOURS, strict=False):
        axes.plot([], [], "s", color=colour, label=source)
    for way, marker in zip(ways, "sxo^v", strict=True):
        axes.plot([], [], marker, color="black", fillstyle="none", label=way)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.set_xlabel("memory given at first / needed")
    axes.set_ylabel("outputs that fit, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(bbox_to_anchor=(1, 1), loc="upper left", fontsize=8)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


_DRAWINGS: Mapping[str, Callable[[Content, Path], None]] = {
    "accuracy": _accuracy,
    "pressure": _pressure,
    "served": _served,
    "utilisation": _utilisation,
    "device": _utilisation,
    "drift": _drift,
}
