"""Plots of the figures, drawn from the JSON files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Content = Mapping[str, Any]
Curves = Mapping[str, Sequence[Content]]

# One colour per system; dashed lines for its variants. Our two are often equal: `virtual` is a thin
# line upon a wide one.
_LOOKS = {
    "static": ("FasterTransformer", "#999999"),
    "orca-max": ("Orca (Max)", "#d62728"),
    "orca-pow2": ("Orca (Pow2)", "#ff9f40"),
    "orca-oracle": ("Orca (Oracle)", "#bcbd22"),
    "paged": ("Aquifer, paged", "#1f77b4"),
    "virtual": ("Aquifer, virtual", "#111111"),
}
_PARTS = {
    "token states": "#2ca02c",
    "reserved": "#aec7e8",
    "internal": "#ff9896",
    "external": "#c49c94",
    "free": "#eeeeee",
}
_WIDE = ("paged",)
_VARIANT_COLOUR = "#e377c2"
"""Colour of the line for `virtual` with retained KV. It may lie on the line without retained KV."""

_DPI = 90

_MOST_LATENCY_S = 1.0  # the end of the axis
_LATENCY_TICKS_S = (0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)

PAPER_TOKEN_STATES = {"orca-max": 20.4, "orca-oracle": 38.2}
"""Percent (section 1, Fig. 2)."""

PAPER_SAVINGS = {
    ("alpaca", "samples"): (6.1, 9.8),
    ("alpaca", "beams"): (37.6, 55.2),
    ("sharegpt", "samples"): (16.2, 30.5),
    ("sharegpt", "beams"): (44.3, 66.3),
}
"""Percent, least and most (section 6.3)."""


def draw(content: Content, file: Path) -> None:
    """Write the plot of a figure.

    Args:
        content: the figure's content, made by `figures`.
        file: the PNG to write.
    """
    figure = DRAWN[str(content["figure"])](content)
    figure.tight_layout()
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _axes(count: int, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False)
    return figure, list(axes[0])


def _draw_curves(axes: Axes, curves: Curves, title: str, limits_s: tuple[float, float]) -> None:
    for label, points in curves.items():
        name, _, variant = label.partition(", ")
        text, colour = _LOOKS[name]
        if variant and name not in _WIDE:
            colour = _VARIANT_COLOUR
        axes.plot(
            [point["rate"] for point in points],
            [point["normalized_latency"] for point in points],
            "o--" if variant else "o-",
            color=colour,
            **_width(name),
            label=f"{text}, {variant}" if variant else text,
        )
    axes.set(title=title, xlabel="requests/s", ylabel="normalized latency, s/token")
    axes.set(yscale="log", ylim=limits_s)
    ticks = [tick for tick in _LATENCY_TICKS_S if limits_s[0] <= tick <= limits_s[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0, None)
    axes.grid(alpha=0.3)


def _limits_s(contents: Sequence[Content]) -> tuple[float, float]:
    """The latencies of all curves of a figure, with a margin."""
    values = [
        point["normalized_latency"]
        for content in contents
        for points in content["curves"].values()
        for point in points
    ]
    return 0.8 * min(values), min(1.25 * max(values), _MOST_LATENCY_S)


def _width(name: str) -> dict[str, Any]:
    """Width and markers of a system's line."""
    if name in _WIDE:
        return {"linewidth": 4.0, "markersize": 6, "alpha": 0.5}
    return {"linewidth": 1.2, "markersize": 3}


def _legend_beside(axes: Sequence[Axes]) -> None:
    """One legend for all axes, on the right of the last one, where there is no data."""
    handles: dict[str, Any] = {}
    for place in axes:
        found, labels = place.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    axes[-1].legend(
        handles.values(), handles, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1)
    )


def _figure_12(content: Content) -> Figure:
    figure, axes = _axes(len(content["settings"]))
    limits_s = _limits_s(content["settings"])
    for place, setting in zip(axes, content["settings"], strict=True):
        title = f"{setting['workload']}, {setting['model']}"
        _draw_curves(place, setting["curves"], title, limits_s)
    _legend_beside(axes)
    return figure


def _figure_13(content: Content) -> Figure:
    figure, axes = _axes(len(content["groups"]))
    for place, group in zip(axes, content["groups"], strict=True):
        for run in group["runs"]:
            text, colour = _LOOKS[run["manager"]]
            bar = place.bar([text], [run["averages_while_waiting"]["requests"]], color=colour)
            place.bar_label(bar, fmt="%.1f", fontsize=7)
        place.set(title=f"{group['workload']}, {group['model']}", ylabel="requests batched")
        place.margins(y=0.12)  # room for the label of the highest bar
        place.tick_params(axis="x", rotation=40, labelsize=7)
    return figure


def _figure_2(content: Content) -> Figure:
    figure, axes = _axes(len(content["groups"]))
    for place, group in zip(axes, content["groups"], strict=True):
        for bar in group["bars"]:
            text = _LOOKS[bar["manager"]][0]
            below = 0.0
            for part, colour in _PARTS.items():
                label = part if bar is group["bars"][0] else None
                height = 100 * bar[part]
                place.bar([text], [height], bottom=[below], color=colour, label=label)
                below += height
            paper = PAPER_TOKEN_STATES.get(bar["manager"])
            if paper is not None:
                place.plot([text], [paper], "k_", markersize=28)
        place.set(title=f"{group['workload']}, {group['model']}", ylabel="KV memory, %")
        place.tick_params(axis="x", rotation=40, labelsize=7)
    axes[0].plot([], [], "k_", label="paper's token states")
    _legend_beside(axes)
    return figure


def _panels(content: Content, title: Callable[[Content], str]) -> Figure:
    figure, axes = _axes(len(content["panels"]), width=3.6)
    limits_s = _limits_s(content["panels"])
    for place, panel in zip(axes, content["panels"], strict=True):
        _draw_curves(place, panel["curves"], title(panel), limits_s)
        if place is not axes[0]:
            place.set_ylabel("")
    _legend_beside(axes)
    return figure


def _figure_14(content: Content) -> Figure:
    return _panels(content, lambda panel: f"{panel['width']} {panel['kind']}")


def _figure_16(content: Content) -> Figure:
    return _panels(content, lambda panel: f"prefix of {panel['prefix_tokens']} tokens")


def _figure_15(content: Content) -> Figure:
    workloads = list(dict.fromkeys(run["workload"] for run in content["runs"]))
    figure, axes = _axes(len(workloads), width=3.4)
    for place, workload in zip(axes, workloads, strict=True):
        for kind, style in (("samples", "o-"), ("beams", "s--")):
            for manager in ("paged", "virtual"):
                runs = [
                    run
                    for run in content["runs"]
                    if (run["workload"], run["manager"]) == (workload, manager)
                    and bool(run["beam_width"]) == (kind == "beams")
                ]
                widths = [run["beam_width"] or run["num_samples"] for run in runs]
                saved = [100 * run["saved_by_sharing"] for run in runs]
                if not runs:
                    continue
                text, colour = _LOOKS[manager]
                label = f"{text}, {kind}"
                place.plot(widths, saved, style, color=colour, label=label, **_width(manager))
            data = "alpaca" if "alpaca" in workload else "sharegpt"
            low, high = PAPER_SAVINGS[data, kind]
            is_first = kind == "samples"
            place.axhspan(
                low, high, color="#2ca02c", alpha=0.2, label="paper's ranges" if is_first else None
            )
        place.set(title=workload, xlabel="sequences", ylabel="memory saved, %", ylim=(0, 100))
        place.set_xticks([2, 4, 6])
    _legend_beside(axes)
    return figure


def _figure_17(content: Content) -> Figure:
    figure, axes = _axes(1, width=7.0)
    _draw_curves(axes[0], content["curves"], "chatbot, opt-13b", _limits_s([content]))
    _legend_beside(axes)
    return figure


def _figure_18(content: Content) -> Figure:
    figure, axes = _axes(1 + len(content["panels"]))
    shapes = content["kernel"]["shapes"]
    names = [f"{s['shape']['batch']} x {s['shape']['tokens']}" for s in shapes]
    ratios = [100 * (s["paged_s"] / s["contiguous_s"] - 1) for s in shapes]
    axes[0].barh(range(len(names)), ratios, color=_LOOKS["paged"][1])
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    axes[0].axvspan(20, 26, color="#2ca02c", alpha=0.3, label="paper: 20 to 26 %")
    axes[0].set(title="paged against contiguous, H200", xlabel="more time in the kernel, %")
    axes[0].legend(fontsize=7)
    for place, panel in zip(axes[1:], content["panels"], strict=True):
        sizes = [str(run["block_size"]) for run in panel["runs"]]
        latencies = [run["normalized_latency"] for run in panel["runs"]]
        place.bar(sizes, latencies, color=_LOOKS["paged"][1])
        place.set(title=f"{panel['workload']}, {panel['rate']} requests/s", xlabel="block size")
        place.set(ylabel="normalized latency, s/token")
    return figure


_SWAP_LOOKS = {
    "recompute": "#ff7f0e",
    "swap, per layer": "#d62728",
    "swap, whole": "#1f77b4",
    "swap, one copy": "#111111",
}


def _figure_19(content: Content) -> Figure:
    figure, (one, many) = _axes(2, width=5.0)
    micro = content["one_sequence"]
    sizes = [entry["block_size"] for entry in micro]
    keys = ("recompute_s", "swap_per layer_s", "swap_whole_s", "swap_virtual_s")
    for key, (name, colour) in zip(keys, _SWAP_LOOKS.items(), strict=True):
        # Swapping is out and in; recomputation is once.
        factor = 1e3 if name == "recompute" else 2e3
        one.plot(sizes, [factor * entry[key] for entry in micro], "o-", color=colour, label=name)
    one.set(title=f"one sequence of {content['tokens']} tokens", ylabel="ms, out and in")
    one.set(xscale="log", yscale="log")
    for name, colour in _SWAP_LOOKS.items():
        runs = [r for r in content["runs"] if r["series"] == name and r["manager"] == "paged"]
        if runs:
            places = [run["block_size"] for run in runs]
            many.plot(places, [r["normalized_latency"] for r in runs], "o-", color=colour)
    for run in content["runs"]:
        if run["manager"] == "virtual":
            name = run["series"]
            many.axhline(
                run["normalized_latency"],
                color=_SWAP_LOOKS[name],
                linestyle=":",
                label=f"virtual, {name}",
            )
    many.set(title=f"sharegpt-like, {content['rate']} requests/s", ylim=(0, None))
    many.set(ylabel="normalized latency, s/token", xscale="log")
    for place in (one, many):
        place.set_xlabel("block size")
        place.set_xticks(sizes, [str(size) for size in sizes])
        place.minorticks_off()
        place.legend(fontsize=7)
    return figure


def _prefixes(content: Content) -> Figure:
    figure, (axes,) = _axes(1, width=6.0)
    names = {"mooncake": "arrivals as recorded", "mooncake-slow": "four times slower"}
    for series, style in zip(content["series"], ("o--", "o-"), strict=True):
        rates = [100 * run["hit_rate"] for run in series["runs"]]
        label = names[series["workload"]]
        axes.plot(series["kv_gb"], rates, style, color=_LOOKS["virtual"][1], label=label)
        bound = 100 * series["runs"][-1]["unbounded_hit_rate"]
    axes.axhline(bound, color="#2ca02c", linestyle=":", label=f"cache without end: {bound:.1f} %")
    axes.set(xlabel="memory for KV, GB", ylabel="tokens of prompts found, %", xscale="log")
    axes.set(title="Mooncake's synthetic trace, Llama-3-8B, H200", ylim=(0, None))
    sizes = content["series"][-1]["kv_gb"]
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


DRAWN: dict[str, Callable[[Content], Figure]] = {
    "2": _figure_2,
    "12": _figure_12,
    "13": _figure_13,
    "14": _figure_14,
    "15": _figure_15,
    "16": _figure_16,
    "17": _figure_17,
    "18": _figure_18,
    "19": _figure_19,
    "prefixes": _prefixes,
}
