"""Tables of README.md from the results.

    python benchmarks/vattention/tables.py            # prints them
    python benchmarks/vattention/tables.py --write    # puts them into README.md

In README.md a table is between two lines, `<!-- PART -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.vattention.record import find

_HERE = Path(__file__).resolve().parent
_MARKED = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_NOT_MEASURED = "Not measured yet."
_TREND_STEPS = 50  # on either side of a step

Content = Mapping[str, Any]


def table(content: Content) -> str:
    """The tables of a part, where they were measured, and what was left out."""
    if content.get("rows") or content.get("ways") or content.get("engines"):
        blocks = [_where(content), *_TABLES[content["part"]](content)]
    else:
        blocks = [_NOT_MEASURED]
    if left_out := content["left_out"]:
        blocks.append(f"Left out: {'; '.join(left_out)}.")
    return "\n\n".join(blocks)


def read(file: Path) -> Content:
    """Read a result."""
    content: Content = json.loads(file.read_text(encoding="utf-8"))
    return content


def all_tables(folder: Path = _HERE) -> dict[str, str]:
    """The tables of all parts, by part."""
    found = {}
    for part in _TABLES:
        file = folder / f"{part}.json"
        found[part] = table(read(file)) if file.is_file() else _NOT_MEASURED
    return found


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A text in which the tables between marks are replaced."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    return _MARKED.sub(replaced, text)


def _where(content: Content) -> str:
    """The machine, or that none was needed."""
    if content["part"] in ("waste", "batch"):
        return "Computed: any machine gives the same."
    environment = content.get("environment", {})
    if content.get("device") == "cpu":
        return f"On a CPU ({environment.get('cpu')}), with small sizes."
    gpu = environment.get("gpu") or {}
    return f"On {gpu.get('name', content.get('device'))}."


def _calls(content: Content) -> list[str]:
    theirs = content["paper_us"]
    names = list(theirs)
    rows = [
        ["paper, CUDA", "2048", "", "", *(_number(theirs[name].get("2048")) for name in names)],
        ["paper's driver", "64", "", "", *(_number(theirs[name].get("64")) for name in names)],
    ]
    for row in content["rows"]:
        state = "busy" if row["is_busy"] else "idle"
        described = [str(row["page_kib"]), str(row["pages_per_call"]), state]
        api = row["api_us_per_call"]
        if api:
            cells = [_median_p99(api.get(name)) for name in names]
            rows.append(["calls of CUDA", *described, *cells])
        ours = row["driver_us_per_page"]
        mapped = _median_p99(ours["map, set access"])
        cells = [mapped if name == "map" else _median_p99(ours.get(name)) for name in names]
        rows.append(["ours, a page", *described, *cells])
    header = ["median (p99), us", "page, KiB", "pages a call", "device", *names]
    return [
        _table(header, rows),
        "Of ours, reserve and free are those of a call, and map includes access.",
    ]


def _bandwidth(content: Content) -> list[str]:
    rows = [
        ["paper, one GPU", size, "", "1", _number(rate), ""]
        for size, rate in content["paper_gb_per_s"]["TP-1"].items()
    ]
    for row in content["rows"]:
        described = [str(row["page_kib"]), str(row["pages_per_call"]), str(row["threads"])]
        rates = [_number(row["create_map_gb_per_s"]), _number(row["map_gb_per_s"])]
        rows.append(["ours", *described, *rates])
    header = ["GB/s a thread", "page, KiB", "pages a call", "threads", "create and map", "map"]
    goal = content["goal_gb_per_s"]
    return [_table(header, rows), f"Goal: at least {goal} with pages of 2048 KiB."]


def _waste(content: Content) -> list[str]:
    sizes = list(dict.fromkeys(row["page_kib"] for row in content["rows"]))
    keys = dict.fromkeys((row["model"], row["tp"]) for row in content["rows"])
    tokens, wastes = [], []
    for model, tp in keys:
        theirs = content["paper"][model][str(tp)]
        name = f"{model}, TP-{tp}"
        tokens.append([name, "paper", *(_number(theirs["tokens"].get(str(s))) for s in sizes)])
        wastes.append([name, "paper", *(_number(theirs["mib"].get(str(s))) for s in sizes)])
        for layout in ("layer-major", "token-major"):
            some = [
                find(content["rows"], model=model, tp=tp, layout=layout, page_kib=size)
                for size in sizes
            ]
            row = [each for each in some if each is not None]
            tokens.append([name, layout, *(_number(each["page_tokens"]) for each in row)])
            cells = [
                " / ".join(
                    _number(each[key] / (1 << 20))
                    for key in ("most_wasted_bytes", "most_unwritten_bytes")
                )
                for each in row
            ]
            wastes.append([name, layout, *cells])
    header = ["", "layout", *(f"{size} KiB" for size in sizes)]
    return [
        "Tokens of a page:",
        _table(header, tokens),
        "Most waste of a request on all devices, MiB: of the paper; of ours, bytes on its pages "
        "beyond its tokens / the same where pages are mapped for "
        f"{content['ahead_tokens']} tokens to come:",
        _table(header, wastes),
    ]


def _overlap(content: Content) -> list[str]:
    rows = []
    for row in content["rows"]:
        steps, calls = row["step_ms"], row["map_calls"]
        rows.append(
            [
                row["way"],
                *(f"{steps[name]:.3f}" for name in ("median", "p99", "p99.9", "max")),
                f"{row['p99.9_over_median']:.3f}",
                f"{_over_trend(row['steps_ms']):.3f}",
                str(row["num_steps"]),
                *(f"{calls[name]['calls']}" for name in ("in_loop", "in_background")),
            ]
        )
    goal = content["goal"]["p99.9_over_median"]
    header = ["pages", "median, ms", "p99", "p99.9", "max", "p99.9 / median"]
    header += ["p99.9 of step / trend", "steps"]
    header += ["calls of map in the loop", "in the background"]
    return [
        _table(header, rows),
        f"Goal: p99.9 / median of at most {goal} in the background. Steps become longer with the "
        f"contexts; the trend is the median of the {2 * _TREND_STEPS + 1} steps around each.",
    ]


def _over_trend(steps_ms: Sequence[float]) -> float:
    """99.9th percentile of a step's time over the median of the steps around it."""
    ratios = []
    for i, step_ms in enumerate(steps_ms):
        around = steps_ms[max(i - _TREND_STEPS, 0) : i + _TREND_STEPS + 1]
        ratios.append(step_ms / float(np.median(around)))
    return float(np.percentile(ratios, 99.9))


def _reclamation(content: Content) -> list[str]:
    rows = [
        [
            name,
            f"{1e3 * way['prefill_s']['median']:.2f}",
            f"{way['over_mapped_before']:.3f}",
            f"{max(way['mapped_pages'])}",
        ]
        for name, way in content["ways"].items()
    ]
    theirs = content["paper"]["sync_over_deferred"]
    header = ["pages", "prefill, ms", "/ mapped before", "pages mapped meanwhile"]
    return [
        _table(header, rows),
        f"Paper: mapping at once over deferred reclamation {theirs['2 MiB']} with pages of 2 MiB, "
        f"{theirs['64 KiB']} with 64 KiB. Goal: deferred / mapped before of at most "
        f"{content['goal']['deferred_over_mapped']}.",
    ]


def _page_sizes(content: Content) -> list[str]:
    sizes = list(dict.fromkeys(row["page_kib"] for row in content["rows"]))
    rows = []
    for name in dict.fromkeys(row["shape"]["name"] for row in content["rows"]):
        cells = []
        for size in sizes:
            found = [
                row
                for row in content["rows"]
                if (row["shape"]["name"], row["page_kib"]) == (name, size)
            ]
            cells.append(f"{found[0]['layer_us']:.1f}" if found else "")
        rows.append([name, *cells])
    return [_table(["us a layer", *(f"{size} KiB" for size in sizes)], rows)]


def _batch(content: Content) -> list[str]:
    sizes = list(dict.fromkeys(row["page_kib"] for row in content["rows"]))
    rows = []
    for model, theirs in content["paper"].items():
        cells = [str(theirs.get(str(size), "")) for size in sizes]
        rows.append([model, "OpenChat, 7 requests/s", "paper", *cells])
    for load, model, layout in dict.fromkeys(
        (row["load"], row["model"], row["layout"]) for row in content["rows"]
    ):
        some = [
            find(content["rows"], load=load, model=model, layout=layout, page_kib=size)
            for size in sizes
        ]
        rows.append(
            [
                model,
                load,
                layout,
                *("" if row is None else _batches(row) for row in some),
            ]
        )
    header = ["largest batch", "load", "layout", *(f"{size} KiB" for size in sizes)]
    return [_table(header, rows), "In brackets: the mean batch while other requests wait."]


def _batches(row: Content) -> str:
    mean = row["mean_batch_while_waiting"]
    return f"{row['largest_batch']}" + (f" ({mean:.0f})" if mean else "")


def _prefill(content: Content) -> list[str]:
    theirs = content["paper_s"]["Llama-3-8B"]
    sides = list(dict.fromkeys(row["side"] for row in content["attention"]))
    rows = []
    for tokens in dict.fromkeys(row["context_tokens"] for row in content["rows"]):
        paper = theirs.get(str(tokens // 1024), {})
        cells = [
            "{} ({})".format(*paper[name]) if name in paper else ""
            for name in ("FA_vAttention", "FA_Paged", "FI_Paged")
        ]
        for side in sides:
            row = find(content["rows"], kv_cache=side, context_tokens=tokens)
            attention = find(content["attention"], side=side, context_tokens=tokens)
            inner = "" if attention is None else f" ({attention['all_layers_s']:.3f})"
            cells.append(f"{row['prefill_s']:.3f}{inner}" if row else inner.strip())
        cells += [
            "" if row is None else f"{row['tokens_per_s']:.0f}"
            for row in (
                find(content["rows"], kv_cache=name, context_tokens=tokens)
                for name in ("virtual", "paged")
            )
        ]
        rows.append([str(tokens), *cells])
    header = ["tokens", "paper: FA_vAttention", "FA_Paged", "FI_Paged", *sides]
    header += ["virtual, tokens/s", "paged, tokens/s"]
    title = "Seconds of a prompt (of its attention alone); the paper's with two A100s:"
    return [title, _table(header, rows)]


def _decode(content: Content) -> list[str]:
    theirs = content["paper_ms"]["Llama-3-8B"]
    sides = list(dict.fromkeys(row["side"] for row in content["attention"]))
    rows = []
    for batch in dict.fromkeys(row["batch"] for row in content["rows"]):
        paper = theirs.get(str(batch), {})
        cells = [
            _number(paper.get(name)) for name in ("FA_vAttention", "FA_Paged", "FI_Paged", "vLLM")
        ]
        for side in sides:
            attention = find(content["attention"], side=side, batch=batch)
            cells.append("" if attention is None else f"{1e3 * attention['all_layers_s']:.3f}")
        for name in ("virtual", "paged"):
            row = find(content["rows"], kv_cache=name, batch=batch)
            cells += (
                ["", ""]
                if row is None
                else [f"{row['step_ms']['median']:.3f}", f"{row['tokens_per_s']:.0f}"]
            )
        rows.append([str(batch), *cells])
    header = ["batch", "paper: FA_vAttention", "FA_Paged", "FI_Paged", "vLLM", *sides]
    header += ["virtual, ms a step", "tokens/s", "paged, ms a step", "tokens/s"]
    title = (
        f"Milliseconds of attention, all layers, contexts of {content['context_tokens']} tokens "
        "(paper: two A100s); then whole steps of the engine:"
    )
    return [title, _table(header, rows)]


def _makespan(content: Content) -> list[str]:
    rows = []
    for context, ratio in dict.fromkeys(
        (row["context_tokens"], row["ratio"]) for row in content["rows"]
    ):
        found = [
            find(content["rows"], kv_cache=name, context_tokens=context, ratio=ratio)
            for name in ("virtual", "paged")
        ]
        cells = ["" if row is None else f"{row['makespan_s']:.2f}" for row in found]
        virtual, paged = found
        ratio_text = ""
        if virtual is not None and paged is not None:
            ratio_text = f"{paged['makespan_s'] / virtual['makespan_s']:.3f}"
        rows.append([str(context), str(ratio), *cells, ratio_text])
    header = ["context", "prompt : output", "virtual, s", "paged, s", "paged / virtual"]
    most = content["paper"]["Llama-3-8B"]["FA_Paged over FA_vAttention, at most"]
    return [
        _table(header, rows),
        f"{content['num_requests']} requests. Paper: 50 requests, FA_Paged / FA_vAttention at "
        f"most {most} for Llama-3-8B.",
    ]


def _targets(content: Content) -> list[str]:
    rows = []
    for name in dict.fromkeys(row["shape"]["name"] for row in content["kernels"]):
        is_decode = name.startswith("decode")
        cells = []
        for kv_cache in ("virtual", "paged"):
            some = [
                row
                for row in content["kernels"]
                if (row["shape"]["name"], row["kv_cache"]) == (name, kv_cache)
            ]
            value = ""
            if some:
                share, rate = 100 * some[0]["of_copy"], some[0]["tflop_per_s"]
                value = f"{share:.1f}" if is_decode else f"{rate:.3g}"
            cells.append(value)
        rows.append([f"{name}, {'% of copy rate' if is_decode else 'TFLOP/s'}", *cells])
    for name, figure in _ENGINE_TARGETS.items():
        cells = []
        for kv_cache in ("virtual", "paged"):
            found = content["engines"].get(kv_cache, {})
            try:
                cells.append(_number(figure(found)))
            except KeyError:  # left out, or the file is older
                cells.append("")
        if any(cells):
            rows.append([name, *cells])
    return [_table(["", "virtual", "paged"], rows)]


_ENGINE_TARGETS: dict[str, Callable[[Content], float]] = {
    "one long request: prefill, s": lambda found: found["long prompt"]["prefill_s"],
    "one long request: decode step, ms": lambda found: found["long prompt"]["step_ms"]["median"],
    "a prompt computed, ms": lambda found: found["cached prompt"]["computed_ms"],
    "the first one found, ms": lambda found: found["cached prompt"]["first_found_ms"],
    "found again, ms": lambda found: found["cached prompt"]["found_again_ms"],
    "found again after another was computed, ms": lambda found: found["cached prompt"][
        "found_later_ms"
    ],
    "another one found, ms": lambda found: found["cached prompt"]["other_found_ms"],
    "prompts that share a prefix, unknown, ms": lambda found: found["shared prefix"][
        "prefix_unknown_ms"
    ],
    "the same, prefix known, ms": lambda found: found["shared prefix"]["prefix_known_ms"],
    "all prompts found: first tokens, ms": lambda found: found["all found"]["first_tokens_ms"],
    "the same again, ms": lambda found: found["all found"]["first_tokens_again_ms"],
    "all prompts found: decode step, ms": lambda found: found["all found"]["step_ms"]["median"],
}

_TABLES: dict[str, Callable[[Content], list[str]]] = {
    "calls": _calls,
    "bandwidth": _bandwidth,
    "waste": _waste,
    "overlap": _overlap,
    "reclamation": _reclamation,
    "page_sizes": _page_sizes,
    "batch": _batch,
    "prefill": _prefill,
    "decode": _decode,
    "makespan": _makespan,
    "targets": _targets,
}


def _number(value: float | None) -> str:
    """A number with three digits or all of those before the point; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _median_p99(figures: Content | None) -> str:
    if figures is None:
        return ""
    return f"{_number(figures['median'])} ({_number(figures['p99'])})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Print the tables, or write them into README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    found = all_tables()
    if not parser.parse_args().write:
        print("\n\n".join(f"## {part}\n\n{text}" for part, text in found.items()))
        return
    file = _HERE / "README.md"
    file.write_text(with_tables(file.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
