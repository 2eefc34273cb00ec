"""Tables of README.md from the results: `python benchmarks/tangram/tables.py` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

_HERE = Path(__file__).resolve().parent


def tables(content: Mapping[str, Any]) -> list[str]:
    """Loading and TTFT by locality, loading by the size of all models, TTFT by devices."""
    return [_loading(content), _ttft(content), _pool(content), _devices(content)]


def batch_tables(content: Mapping[str, Any]) -> list[str]:
    """Loading and TTFT by batch size and locality."""
    return [_batches(content["batches"])]


def split_tables(content: Mapping[str, Any]) -> list[str]:
    """TTFT by split, and the ratios of fixed splits to the one rule."""
    return [_splits(content["splits"]), _ratios(content["splits"])]


def device_tables(content: Mapping[str, Any]) -> list[str]:
    """Loading and TTFT by locality and batch, and figures by model."""
    return [_device_levels(content), _device_models(content)]


def _device_levels(content: Mapping[str, Any]) -> str:
    modes = list(content["locality"]["1"]["L1"])
    rows = []
    for size, found in content["locality"].items():
        for level, row in found.items():
            ours = row["tensor"]
            ratios = [
                f"{row[mode]['loading_ms'] / ours['loading_ms']:.1f}" if mode in row else ""
                for mode in modes[1:]
            ]
            loading = [f"{row[mode]['loading_ms']:.0f}" if mode in row else "" for mode in modes]
            ttft = [
                f"{row[mode]['ttft_ms']['mean']:.0f}, {row[mode]['ttft_ms']['p99']:.0f}"
                if mode in row
                else ""
                for mode in modes
            ]
            rate = f"{ours['moved_gb_per_s']:.0f}"
            rows.append([size, level, *loading, " / ".join(filter(None, ratios)), rate, *ttft])
    header = ["batch", "", *(f"{mode}: loading" for mode in modes), "times ours", "GB/s of ours"]
    return _table([*header, *(f"{mode}: TTFT" for mode in modes)], rows)


def _device_models(content: Mapping[str, Any]) -> str:
    found = content["locality"]["1"]
    modes = list(found["L1"])
    rows = []
    for model, num_bytes in content["weight_bytes"].items():
        cells = [model, f"{num_bytes / 1e9:.1f}"]
        for mode in modes:
            seconds = [
                served["first_token_s"]
                for row in found.values()
                for served in row[mode]["served"]
                if served["model"] == model
            ]
            cells.append(f"{1e3 * sum(seconds) / len(seconds):.0f}")
        alone = content["alone"][model]
        cells += [f"{content['resident_ms'][model]:.1f}", f"{alone['resident_ms']:.1f}"]
        on_demand, reserved = (alone[f"{name}_tokens_per_s"] for name in ("on_demand", "reserved"))
        cells += [
            f"{on_demand:.0f}",
            f"{reserved:.0f}",
            f"{100 * (1 - on_demand / reserved):+.2f} %",
        ]
        rows.append(cells)
    return _table(
        [
            "",
            "GB",
            *(f"TTFT, {mode}" for mode in modes),
            "resident, one of eight",
            "resident, alone",
            "decode, on demand",
            "decode, reserved",
            "loss",
        ],
        rows,
    )


def _loading(content: Mapping[str, Any]) -> str:
    return _by_level(content, lambda row: f"{row['loading_ms']:.0f}")


def _ttft(content: Mapping[str, Any]) -> str:
    return _by_level(content, lambda row: f"{row['ttft_mean_ms']:.0f}, {row['ttft_p99_ms']:.0f}")


def _by_level(content: Mapping[str, Any], shown: Any) -> str:
    modes = list(content["locality"]["h200"]["L1"])
    rows = [
        [setting, level, *(shown(row[mode]) for mode in modes)]
        for setting, found in content["locality"].items()
        for level, row in found.items()
    ]
    return _table(["", "", *modes], rows)


def _pool(content: Mapping[str, Any]) -> str:
    levels = list(content["locality"]["h200"])
    rows = []
    for count, found in content["pool"].items():
        cells = [count, f"{found['models_gb']:.0f}"]
        for level in levels:
            ours, whole = (
                found[level][mode]["loading_ms"] for mode in ("tensor", "whole, not kept")
            )
            cells.append(f"{ours:.0f} of {whole:.0f} ms, {100 * ours / whole:.0f} %")
        rows.append(cells)
    return _table(["models", "GB", *levels], rows)


def _batches(batches: Mapping[str, Any]) -> str:
    modes = ("tensor", "reserved", "whole, not kept")
    rows = []
    for size, found in batches.items():
        for level in (level for level in found if level != "reserved_gb"):
            row = found[level]
            ours_ms = row["tensor"]["loading_ms"]
            rows.append(
                [
                    size,
                    f"{found['reserved_gb']:.1f}",
                    level,
                    *(f"{row[mode]['loading_ms']:.0f}" for mode in modes),
                    " / ".join(f"{row[mode]['loading_ms'] / ours_ms:.2f}" for mode in modes[1:]),
                    *(f"{row[mode]['ttft_mean_ms']:.0f}" for mode in modes),
                ]
            )
    header = ["batch", "reserved, GB", "", *(f"{mode}: loading" for mode in modes), "times ours"]
    return _table([*header, *(f"{mode}: TTFT" for mode in modes)], rows)


def _devices(content: Mapping[str, Any]) -> str:
    rows = []
    for rate, found in content["devices"].items():
        for name in found["2"]:
            cells = [
                f"{of[name]['ttft_p99_ms'] / 1e3:.1f} ({of[name]['ttft_mean_ms'] / 1e3:.1f})"
                if name in of
                else ""
                for of in found.values()
            ]
            rows.append([f"{rate}/s", name, *cells])
    counts = list(next(iter(content["devices"].values())))
    return _table(
        ["", "", *("1 device" if count == "1" else f"{count} devices" for count in counts)], rows
    )


def _splits(settings: Mapping[str, Any]) -> str:
    first = next(iter(settings.values()))
    rows = []
    for share in first:
        if share == "compared":
            continue
        cells = []
        for found in settings.values():
            row = found[share]
            mean_ms, p99_ms = (
                geometric_mean(row[f"{field}_by_seed"]) for field in ("ttft_mean_ms", "ttft_p99_ms")
            )
            cells.append(
                f"{mean_ms:.0f}, {p99_ms:.0f} | "
                f"{row['loading_ms']:.0f} | {100 * row['prefix_hits']:.0f} %"
            )
        rows.append([share if share == "one rule" else f"{100 * float(share):.0f} %", *cells])
    header = [""]
    for name in settings:
        header += [f"{name}: TTFT", "loading", "hits"]
    return _table(header, rows)


def _ratios(settings: Mapping[str, Any]) -> str:
    rows = []
    for name, found in settings.items():
        for field, shown in (("ttft_mean_ms", "mean"), ("ttft_p99_ms", "p99")):
            row = found["compared"][field]
            best, worst = row["best_by_rule"], row["worst_reasonable_by_rule"]
            rows.append(
                [
                    name,
                    shown,
                    f"{100 * float(row['best_split']):.0f} %",
                    f"{best['mean']:.2f} ({best['low']:.2f} to {best['high']:.2f})",
                    f"{best['least']:.2f} to {best['most']:.2f}",
                    f"{worst['mean']:.2f} ({worst['low']:.2f} to {worst['high']:.2f})",
                ]
            )
    head = ["", "TTFT", "best split", "its ratio to the rule", "of single traces"]
    return _table([*head, "worst of 50, 67, 75 %"], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _read(*names: str) -> dict[str, Any]:
    """The content of result files, together."""
    content: dict[str, Any] = {}
    for name in names:
        content |= json.loads((_HERE / name).read_text(encoding="utf-8"))
    return content


def all_tables() -> list[str]:
    """The tables of all results."""
    on_device = _read("device-locality.json", "device-decode.json")
    return [
        *device_tables(on_device),
        *tables(_read("models.json")),
        *batch_tables(_read("batches.json")),
        *split_tables(_read("splits.json")),
    ]


if __name__ == "__main__":
    print("\n\n".join(all_tables()))
