"""`aquifer replay`: a trace on a modelled device, as a table, a file and a plot."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from aquifer.bench.options import REPLAY
from aquifer.bench.report import finish, new_table
from aquifer.bench.result import check_writable
from aquifer.errors import ConfigError
from aquifer.parameters import with_options
from aquifer.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from aquifer.bench.replay import Bounds, Run, Target, Workload
    from aquifer.sim.config import LoadingConfig, ReplayConfig
    from aquifer.sim.device import DeviceModel


@with_options(REPLAY)
def replay(
    trace: Annotated[
        Path, typer.Argument(help="A trace or a list of lengths: see docs/replay.md.")
    ],
    options: SimpleNamespace,
) -> None:
    """Replay a trace on a modelled device: which cache, how much memory, what rate?"""
    from aquifer.bench.replay import Workload, sustained_rate
    from aquifer.bench.replay_cluster import target_of
    from aquifer.bench.replay_plot import plot
    from aquifer.sim.trace import fit_lengths, read_trace

    rates = _rates(options)
    configs = _configs(options)
    targets = [target_of(config, options) for config in configs]
    config = configs[0]
    context = max(map(config.context, config.models.values()))
    requests, num_changed = fit_lengths(
        read_trace(trace, outputs_of=options.outputs_of), context, cut=options.cut
    )
    if not requests:
        raise ConfigError(f"no request of {trace} fits {context} tokens; try --cut")
    workload = Workload(requests, options.num_requests or len(requests), options.seed)
    _check_files(options)
    console = Console()
    start_s = time.perf_counter()
    runs = _run(targets, workload, rates, options, console)
    simulated = sum(run.num_tokens for run in runs) / (time.perf_counter() - start_s)
    kv_size = format_size(runs[0].result.kv_budget_bytes)
    if not any(run.result.served for run in runs):
        raise ConfigError(
            f"none of the {workload.num_requests} requests could be served in {kv_size} for KV; "
            "give more --memory"
        )
    for_what = "KV" if config.loading is None else "weights and KV"
    title = (
        f"{trace.name}: {workload.num_requests} requests, {' and '.join(config.models)} on "
        f"{_devices(config, options)}, {kv_size} for {for_what}"
    )
    table = _table(title, runs, options)
    if num_changed:
        what = "cut" if options.cut else "left out"
        table.caption = (
            f"{table.caption}\n{num_changed} requests of more than {context} tokens were {what}"
        )
    sustained = {
        config.manager: sustained_rate(
            [run for run in runs if run.manager == config.manager], _bounds(options)
        )
        for config in configs
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
    finish(table, figures, options.output)
    console.print(f"{simulated:,.0f} tokens of prompts and outputs simulated each second")
    for line in _conclusions(runs, sustained, options):
        console.print(line)
    if options.plot is not None:
        plot(runs, options.plot, title)
        console.print(f"plotted in {options.plot}")


def _conclusions(
    runs: list[Run], sustained: dict[str, float | None], options: SimpleNamespace
) -> Iterator[str]:
    """Lines about the rates that were found, and whether they can be trusted."""
    from aquifer.bench.replay import exceeded, queue_waits_s

    for name, rate in sustained.items():
        tried = [run for run in runs if run.manager == name]
        if options.find_rate and not any(exceeded(run, _bounds(options)) for run in tried):
            yield (
                f"{name}: no bound is reached, up to {rate:.3g} requests/s, the highest rate "
                "tried; replay more requests (--num-requests)"
            )
        elif rate is not None:
            what = "highest rate" if options.find_rate else "highest of these rates"
            yield f"{name}: {rate:.3g} requests/s is the {what} within the bounds"
        elif options.find_rate:
            reasons = ", ".join(exceeded(tried[0], _bounds(options)))
            yield f"{name}: no rate is within the bounds; at {tried[0].rate:.3g}/s: {reasons}"
    judged = [run for run in runs if not options.find_rate or run.rate == sustained[run.manager]]
    growing = [(run, waits_s) for run in judged if (waits_s := queue_waits_s(run)) is not None]
    for run, (second_s, last_s) in growing:
        yield (
            f"warning: {_named(run)}: the queue grows, from waits of {second_s:.2g} s to "
            f"{last_s:.2g} s"
        )
    if growing:
        yield "Where the queue grows, a longer trace has higher latencies (docs/replay.md)."


def _devices(config: ReplayConfig, options: SimpleNamespace) -> str:
    """The devices, for the title."""
    if options.workers is None:
        return config.device.name
    named = "" if ":" in options.workers else f" of {config.device.name}"
    return f"workers {options.workers}{named}"


def _named(run: Run) -> str:
    return run.manager if run.rate is None else f"{run.manager} at {run.rate:.3g} requests/s"


def _bounds(options: SimpleNamespace) -> Bounds:
    from aquifer.bench.replay import Bounds

    return Bounds(options.latency_bound, options.ttft_bound, options.tpot_bound)


def _check_files(options: SimpleNamespace) -> None:
    """Check before the runs what is written after them."""
    from aquifer.bench.replay_plot import check_plot

    if options.save_requests and options.output is None:
        raise ConfigError("--save-requests adds to the file of --output; give one")
    if options.output is not None:
        check_writable(options.output, "--output")
    if options.plot is not None:
        check_plot(options.plot)
        check_writable(options.plot, "--plot")


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


def _configs(options: SimpleNamespace) -> list[ReplayConfig]:
    """What to replay on, for each cache manager to compare."""
    from aquifer.sim.calibration import calibrate
    from aquifer.sim.config import MANAGERS, ReplayConfig
    from aquifer.sim.device import find_device, find_model

    managers = options.kv_cache.split(",")
    for name in managers:
        if name not in MANAGERS:
            raise ConfigError(f"--kv-cache {name!r} is unknown; choose from {', '.join(MANAGERS)}")
        if managers.count(name) > 1:
            raise ConfigError(f"--kv-cache names {name} twice; name it once")
    models = {}
    for text in options.model:
        name, _, shape = text.rpartition("=")
        if (name or shape) in models:
            raise ConfigError(
                f"--model names {name or shape} twice; write NAME=SHAPE with different names"
            )
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
        kv_layout=options.kv_layout,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_samples=options.num_samples,
        beam_width=options.beam_width,
        prefix_caching=options.enable_prefix_caching,
        preemption_mode=options.preemption_mode,
        swap_space_bytes=options.swap_space,
        seed=options.seed,
        loading=_loading(options, device),
        states_lengths=options.lengths == "known",
        length_prediction=options.length_prediction,
    )
    return [replace(config, manager=name) for name in managers]


def _loading(options: SimpleNamespace, device: DeviceModel) -> LoadingConfig | None:
    """How weights come and go; None if all stay in the pool."""
    from aquifer.sim.config import LoadingConfig

    if options.weights == "resident":
        if options.load_gb_per_s is not None:
            raise ConfigError("--load-gb-per-s needs --weights tensor or whole")
        return None
    given = options.load_gb_per_s
    bytes_per_s = device.link_bandwidth if given is None else 1e9 * given
    return LoadingConfig(bytes_per_s, is_exclusive=options.weights == "whole")


def _run(
    targets: list[Target],
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
            return compare(targets, workload, rates, advance)
        bounds = _bounds(options)
        return [run for target in targets for run in find_rate(target, workload, bounds, advance)]


def _described(config: ReplayConfig, options: SimpleNamespace) -> dict[str, Any]:
    """What the replay ran on, for the result's file."""
    return {
        "models": {name: shape.name for name, shape in config.models.items()},
        "device": asdict(config.device),
        "memory_bytes": config.budget_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "kv_layout": config.kv_layout,
        "page_bytes": config.page_bytes,
        "num_samples": config.num_samples,
        "beam_width": config.beam_width,
        "prefix_caching": config.prefix_caching,
        "preemption_mode": config.preemption_mode,
        "lengths": "known" if config.states_lengths else "hidden",
        "length_prediction": config.length_prediction,
        "loading": None if config.loading is None else asdict(config.loading),
        "workers": options.workers,
        "placement": options.placement,
        "fail": options.fail,
        "notice": options.notice,
        "report_every": options.report_every,
        "seed": config.seed,
        "latency_bound": options.latency_bound,
        "ttft_bound": options.ttft_bound,
        "tpot_bound": options.tpot_bound,
    }


def _table(title: str, runs: list[Run], options: SimpleNamespace) -> Table:
    """A line for each run."""
    table = new_table(title)
    # So that it fits 80 columns.
    table.box, table.collapse_padding, table.pad_edge = None, True, False
    for column in ("KV cache", "req/s", "s/token", "TTFT, s", "TPOT, s", "tok/s", "batched"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    for column in ("waste", "preempt", *(["hits"] if options.enable_prefix_caching else [])):
        table.add_column(column, justify="right")
    lines = ["s/token: mean latency by output token; tok/s: outputs"]
    lines.append("TTFT, TPOT: 99th percentiles")
    for run in runs:
        table.add_row(*_row(run, run.figures()))
        if run.result.loads:
            loaded = format_size(sum(load.loaded_bytes for load in run.result.loads))
            seconds = sum(load.seconds for load in run.result.loads)
            lines.append(
                f"{_named(run)}: {len(run.result.loads)} loads of weights, {loaded} in "
                f"{seconds:.3g} s"
            )
        num_failed = len(run.result.failed)
        for reason, count in Counter(run.result.failed.values()).items():
            lines.append(f"{_named(run)}: {count} requests failed: {reason}")
        if run.result.num_unserved > num_failed:
            lines.append(
                f"{_named(run)}: {run.result.num_unserved - num_failed} of "
                f"{len(run.result.records)} "
                "requests could not be served: each is too large for the memory or its model"
            )
    table.caption = "\n".join(lines)
    return table


def _row(run: Run, figures: dict[str, Any]) -> list[str]:
    """One line of the table."""
    from aquifer.bench.replay import kv_waste

    def shown(name: str, factor: float, digits: str = ".3g") -> str:
        value = figures[name]
        return "-" if value is None else f"{value * factor:{digits}}"

    queries = figures["prefix_cache_queries"]
    return [
        run.manager,
        "recorded" if run.rate is None else f"{run.rate:.3g}",
        shown("normalized_latency", 1, ".4f"),
        shown("p99_ttft_ms", 1e-3),
        shown("p99_tpot_ms", 1e-3),
        f"{figures['output_throughput']:.0f}",
        f"{figures['averages']['requests']:.1f}",
        f"{kv_waste(run):.1%}",
        str(figures["num_preemptions"]),
        *([f"{figures['prefix_cache_hits'] / queries:.1%}"] if queries else []),
    ]
