"""Plots of the parts, drawn from their JSON files alone."""

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

_DPI = 80
_LOOKS = {"virtual": "#111111", "paged": "#1f77b4"}
_PAGES_TITLE = "page size, KiB"


def draw(content: Content, file: Path) -> bool:
    """Draw a part; returns whether it has a plot, and results to draw."""
    if content["part"] not in _DRAWN or not (content.get("rows") or content.get("ways")):
        return False
    figure = _DRAWN[content["part"]](content)
    figure.tight_layout()
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)
    return True


def _axes(count: int, width: float = 5.0, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(count * width, height), squeeze=False)
    return figure, list(axes[0])


def _distinct(rows: Sequence[Content], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _overlap(content: Content) -> Figure:
    rows = content["rows"]
    figure, axes = _axes(len(rows), 4.2)
    top = 1.1 * max(row["step_ms"]["max"] for row in rows)
    for place, row in zip(axes, rows, strict=True):
        place.plot(row["steps_ms"], linewidth=0.5, color="#111111")
        place.set(title=f"pages: {row['way']}", xlabel="decode step", ylim=(0, top))
    axes[0].set_ylabel("latency, ms")
    return figure


def _reclamation(content: Content) -> Figure:
    figure, (axes,) = _axes(1, 6.0)
    ways = content["ways"]
    heights = [1e3 * way["prefill_s"]["median"] for way in ways.values()]
    bars = axes.bar(range(len(ways)), heights, color="#1f77b4")
    axes.bar_label(bars, [f"{way['over_mapped_before']:.3f}" for way in ways.values()])
    axes.set_xticks(range(len(ways)), list(ways), fontsize=8)
    axes.set(ylabel="ms", title=f"prefill of {content['prompt_tokens']} tokens")
    return figure


def _page_sizes(content: Content) -> Figure:
    rows = content["rows"]
    figure, (axes,) = _axes(1, 6.0)
    for name in dict.fromkeys(row["shape"]["name"] for row in rows):
        some = [row for row in rows if row["shape"]["name"] == name]
        times = [row["layer_us"] / some[0]["layer_us"] for row in some]
        axes.plot([row["page_kib"] for row in some], times, "o-", label=name)
    sizes = _distinct(rows, "page_kib")
    axes.set(xlabel=_PAGES_TITLE, ylabel="time / that of the smallest pages", ylim=(0, 1.5))
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure


def _batch(content: Content) -> Figure:
    rows = content["rows"]
    loads = _distinct(rows, "load")
    models = _distinct(rows, "model")
    figure, axes = _axes(len(loads), 7.0)
    for place, load in zip(axes, loads, strict=True):
        series = list(dict.fromkeys((row["layout"], row["page_kib"]) for row in rows))
        for index, (layout, page_kib) in enumerate(series):
            some = [
                row
                for row in rows
                if (row["load"], row["layout"], row["page_kib"]) == (load, layout, page_kib)
            ]
            places = [models.index(row["model"]) + 0.1 * (index - 3.5) for row in some]
            heights = [row["largest_batch"] for row in some]
            place.bar(places, heights, 0.1, label=f"{layout}, {page_kib} KiB")
        place.set_xticks(range(len(models)), models)
        place.set(title=load, ylabel="largest batch")
    axes[0].legend(fontsize=7)
    return figure


def _prefill(content: Content) -> Figure:
    figure, (rates, kernels) = _axes(2)
    for kv_cache, colour in _LOOKS.items():
        some = [row for row in content["rows"] if row["kv_cache"] == kv_cache]
        tokens = [row["context_tokens"] for row in some]
        rates.plot(
            tokens, [row["tokens_per_s"] for row in some], "o-", color=colour, label=kv_cache
        )
    rates.set(xlabel="tokens of the prompt", ylabel="tokens/s", xscale="log", ylim=(0, None))
    rates.legend(fontsize=8)
    _attention(kernels, content["attention"], "context_tokens", "tokens of the prompt")
    return figure


def _decode(content: Content) -> Figure:
    figure, (rates, kernels) = _axes(2)
    for kv_cache, colour in _LOOKS.items():
        some = [row for row in content["rows"] if row["kv_cache"] == kv_cache]
        batches = [row["batch"] for row in some]
        rates.plot(
            batches, [row["tokens_per_s"] for row in some], "o-", color=colour, label=kv_cache
        )
    rates.set(xlabel="batch", ylabel="tokens/s", ylim=(0, None))
    rates.legend(fontsize=8)
    _attention(kernels, content["attention"], "batch", "batch")
    return figure


def _attention(axes: Axes, rows: Sequence[Content], key: str, title: str) -> None:
    for side in _distinct(rows, "side"):
        some = [row for row in rows if row["side"] == side]
        heights = [1e3 * row["all_layers_s"] for row in some]
        colour = _LOOKS.get(side, "#2ca02c")
        axes.plot([row[key] for row in some], heights, "o-", color=colour, label=side)
    axes.set(xlabel=title, ylabel="attention of all layers, ms", xscale="log", yscale="log")
    axes.legend(fontsize=8)


def _makespan(content: Content) -> Figure:
    rows = content["rows"]
    contexts, ratios = _distinct(rows, "context_tokens"), _distinct(rows, "ratio")
    figure, axes = _axes(len(contexts), 4.2)
    for place, context in zip(axes, contexts, strict=True):
        for index, (kv_cache, colour) in enumerate(_LOOKS.items()):
            some = [
                row
                for row in rows
                if (row["context_tokens"], row["kv_cache"]) == (context, kv_cache)
            ]
            places = [ratios.index(row["ratio"]) + 0.4 * (index - 0.5) for row in some]
            heights = [row["makespan_s"] for row in some]
            place.bar(places, heights, 0.4, color=colour, label=kv_cache)
        place.set_xticks(range(len(ratios)), [str(ratio) for ratio in ratios])
        place.set(title=f"{context} tokens", xlabel="prompt : output", ylabel="makespan, s")
    axes[0].legend(fontsize=8)
    return figure


_DRAWN: dict[str, Callable[[Content], Figure]] = {
    "overlap": _overlap,
    "reclamation": _reclamation,
    "page_sizes": _page_sizes,
    "batch": _batch,
    "prefill": _prefill,
    "decode": _decode,
    "makespan": _makespan,
}
