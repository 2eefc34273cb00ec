"""`aquifer replay`: a trace on a modelled device, as a table, a file and a plot."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from aquifer.bench.options import REPLAY
from aquifer.bench.report import finish, new_table
from aquifer.errors import ConfigError
from aquifer.parameters import with_options
from aquifer.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from aquifer.bench.replay import Run, Workload
    from aquifer.sim.config import ReplayConfig


@with_options(REPLAY)
def replay(
    trace: Annotated[
        Path, typer.Argument(help="A trace or a list of lengths: see docs/replay.md.")
    ],
    options: SimpleNamespace,
) -> None:
    """Replay a trace on a modelled device: which cache, how much memory, what rate?"""
    from aquifer.bench.replay import Workload, plot, sustained_rate
    from aquifer.sim.trace import fit_lengths, read_trace

    rates = _rates(options)
    config, managers = _config(options)
    context = max(map(config.context, config.models.values()))
    requests, num_changed = fit_lengths(
        read_trace(trace, outputs_of=options.outputs_of), context, cut=options.cut
    )
    if not requests:
        raise ConfigError(f"no request of {trace} fits {context} tokens; try --cut")
    workload = Workload(requests, options.num_requests or len(requests), options.seed)
    console = Console()
    start_s = time.perf_counter()
    runs = _run(config, managers, workload, rates, options, console)
    simulated = sum(run.num_tokens for run in runs) / (time.perf_counter() - start_s)
    title = (
        f"{trace.name}: {workload.num_requests} requests, {' and '.join(config.models)} on "
        f"{config.device.name}, {format_size(runs[0].result.kv_budget_bytes)} for KV"
    )
    table = _table(title, runs, options)
    if num_changed:
        what = "cut" if options.cut else "left out"
        table.caption = (
            f"{table.caption}\n{num_changed} requests of more than {context} tokens were {what}"
        )
    sustained = {
        name: sustained_rate([run for run in runs if run.manager == name], options.latency_bound)
        for name in managers
    }
    figures = {
        "benchmark": "replay",
        "trace": trace.name,
        "num_requests": workload.num_requests,
        "num_too_long": num_changed,
        **_described(config, options),
        "sustained_rate": sustained,
        "simulated_tokens_per_second": simulated,
        "runs": [run.figures(with_requests=options.save_requests) for run in runs],
    }
    if options.plot is not None:
        plot(runs, options.plot, title)
    finish(table, figures, options.output)
    console.print(f"{simulated:,.0f} tokens of prompts and outputs simulated each second")
    for name, rate in sustained.items():
        if rate is not None:
            what = "highest rate" if options.find_rate else "highest of these rates"
            console.print(f"{name}: {rate:.3g} requests/s is the {what} within the bound")


def _rates(options: SimpleNamespace) -> list[float | None]:
    """The rates to run at; None is the trace's own times."""
    if sum((options.rate is not None, options.rates is not None, options.find_rate)) > 1:
        raise ConfigError("give one of --rate, --rates and --find-rate")
    if options.rates is None:
        return [options.rate]
    try:
        rates = [float(part) for part in options.rates.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--rates is {options.rates!r}; write 1,2,4")
    return [*rates]


def _config(options: SimpleNamespace) -> tuple[ReplayConfig, list[str]]:
    """What to replay on, with the first cache manager; and all managers to compare."""
    from aquifer.sim.config import MANAGERS, ReplayConfig
    from aquifer.sim.device import calibrate, find_device, find_model

    managers = options.kv_cache.split(",")
    for name in managers:
        if name not in MANAGERS:
            raise ConfigError(f"--kv-cache {name!r} is unknown; choose from {', '.join(MANAGERS)}")
    if options.beam_width and options.num_samples > 1:
        raise ConfigError("give one of --num-samples and --beam-width")
    models = {}
    for text in options.model:
        name, _, shape = text.rpartition("=")
        models[name or shape] = find_model(shape)
    device = find_device(options.device)
    if options.calibrate is not None:
        device = calibrate(device, next(iter(models.values())), options.calibrate)
    config = ReplayConfig(
        models=models,
        device=device,
        manager=managers[0],
        memory_bytes=options.memory,
        page_bytes=options.page_size,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_samples=options.num_samples,
        beam_width=options.beam_width,
        prefix_caching=options.enable_prefix_caching,
        preemption_mode=options.preemption_mode,
        swap_space_bytes=options.swap_space,
        seed=options.seed,
    )
    return config, managers


def _run(
    config: ReplayConfig,
    managers: list[str],
    workload: Workload,
    rates: list[float | None],
    options: SimpleNamespace,
    console: Console,
) -> list[Run]:
    """Run every manager, with a bar that shows how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from aquifer.bench.replay import compare, find_rate

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def advance(what: str, num_ended: int, total: int) -> None:
            progress.update(task, description=what, completed=num_ended, total=total)

        if not options.find_rate:
            return compare(config, managers, workload, rates, advance)
        runs = []
        for name in managers:
            runs += find_rate(
                replace(config, manager=name), workload, options.latency_bound, advance
            )
        return runs


def _described(config: ReplayConfig, options: SimpleNamespace) -> dict[str, Any]:
    """What the replay ran on, for the result's file."""
    return {
        "models": {name: shape.name for name, shape in config.models.items()},
        "device": asdict(config.device),
        "memory_bytes": config.budget_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "page_bytes": config.page_bytes,
        "num_samples": config.num_samples,
        "beam_width": config.beam_width,
        "prefix_caching": config.prefix_caching,
        "preemption_mode": config.preemption_mode,
        "seed": config.seed,
        "latency_bound": options.latency_bound,
    }


def _table(title: str, runs: list[Run], options: SimpleNamespace) -> Table:
    """A line for each run."""
    table = new_table(title)
    table.box = None  # so that it fits 80 columns
    for column in ("KV cache", "req/s", "s/token", "TTFT, s", "TPOT, ms", "tok/s", "batched"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    for column in ("waste", "preempt", *(["hits"] if options.enable_prefix_caching else [])):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(*_row(run, run.figures()))
    table.caption = (
        "s/token: mean latency by output token; tok/s: outputs\n"
        "TTFT, TPOT: 99th percentile and median"
    )
    return table


def _row(run: Run, figures: dict[str, Any]) -> list[str]:
    """One line of the table."""
    from aquifer.bench.replay import kv_waste

    def shown(name: str, factor: float) -> str:
        value = figures[name]
        return "" if value is None else f"{value * factor:.3g}"

    queries = figures["prefix_cache_queries"]
    return [
        run.manager,
        "recorded" if run.rate is None else f"{run.rate:.3g}",
        f"{figures['normalized_latency']:.4f}",
        shown("p99_ttft_ms", 1e-3),
        shown("median_tpot_ms", 1),
        f"{figures['output_throughput']:.0f}",
        f"{figures['averages']['requests']:.1f}",
        f"{kv_waste(run):.1%}",
        str(figures["num_preemptions"]),
        *([f"{figures['prefix_cache_hits'] / queries:.1%}"] if queries else []),
    ]
