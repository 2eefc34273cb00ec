"""`aquifer bench`: measurements that print a table and write a file.

What is heavy is imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import save, summarize
from aquifer.bench.workload import LengthRange, Workload
from aquifer.config import ModelSpec, format_size, parse_size
from aquifer.errors import ConfigError

if TYPE_CHECKING:
    from aquifer.bench.floor import Rates
    from aquifer.bench.replay import Run
    from aquifer.engine.llm import LLM

app = typer.Typer(no_args_is_help=True, help="Measure the engine; each result is also a file.")

ModelArgument = Annotated[str, typer.Argument(help="A checkpoint's path, or a bundled model.")]
InputLen = Annotated[str, typer.Option(help="Prompt tokens: 128, or a range 16-256.")]
OutputLen = Annotated[str, typer.Option(help="Output tokens: 128, or a range 16-256.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy: random weights, config.json alone.")]
KVCache = Annotated[str, typer.Option(help="virtual or paged.")]
Memory = Annotated[str | None, typer.Option(help="The pool's budget, such as 4GiB.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
BatchedTokens = Annotated[int | None, typer.Option(help="Tokens of one step.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the workload, and of sampling.")]
Repeats = Annotated[int, typer.Option(help="Timed runs; the median counts.", min=1)]
Against = Annotated[
    bool, typer.Option("--transformers", help="Also run Transformers' generate, turn by turn.")
]
Output = Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")]


@app.command()
def throughput(
    model: ModelArgument,
    num_prompts: Annotated[int, typer.Option(help="Requests, all there at the start.", min=1)] = 32,
    input_len: InputLen = "16-256",
    output_len: OutputLen = "16-256",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    device: Device = "auto",
    load_format: LoadFormat = "auto",
    kv_cache: KVCache = "virtual",
    memory: Memory = None,
    dtype: Dtype = "auto",
    max_num_batched_tokens: BatchedTokens = None,
    seed: Seed = 0,
    repeats: Repeats = 3,
    transformers: Against = False,
    output: Output = None,
) -> None:
    """Output tokens a second of many requests at once."""
    if transformers and temperature:
        raise ConfigError("--transformers compares greedy outputs; leave --temperature at 0")
    from aquifer.bench import offline
    from aquifer.bench.floor import Cost

    options = _options(device, load_format, kv_cache, memory, dtype, max_num_batched_tokens)
    inputs, outputs = LengthRange.parse(input_len), LengthRange.parse(output_len)
    with _open(model, options, num_prompts, seed) as llm:
        (info,) = llm.engine.models.values()
        workload = Workload.random(num_prompts, inputs, outputs, info.vocab_size, seed)
        peer = offline.load_transformers(llm) if transformers else None
        ours, theirs = offline.compare(llm, workload, repeats, peer, temperature)
        described, cost = _describe("throughput", llm, options), Cost.of(llm)
    rates = _rates(described)
    figures = {
        **described,
        "input_len": input_len,
        "output_len": output_len,
        "temperature": temperature,
        "seed": seed,
        **offline.figures(workload, ours, theirs, cost, rates),
    }
    table = _table(_title(figures))
    for column in ("", "output tok/s", "prompt tok/s", "s", "runs"):
        table.add_column(column, justify="right" if column else "left")
    for name, key in (("Aquifer", "aquifer"), ("Transformers", "transformers")):
        if key in figures:
            _add_series(table, name, figures[key])
    table.add_row(
        "floor",
        f"{figures['floor_output_throughput']:.1f}",
        "",
        f"{figures['floor_seconds']:.2f}",
        "",
    )
    table.caption = f"floor: weights and KV at {_rates_text(rates)}"
    if theirs is not None:
        table.caption += f"\n{_against(figures)}"
    _finish(table, figures, output)


@app.command()
def latency(
    model: ModelArgument,
    batch_size: Annotated[str, typer.Option(help="Requests that decode at once: 1,32,128.")] = "1",
    input_len: InputLen = "128",
    output_len: OutputLen = "128",
    everything_mapped: Annotated[
        bool,
        typer.Option("--everything-mapped", help="Map all KV once the prompts are read."),
    ] = False,
    device: Device = "auto",
    load_format: LoadFormat = "auto",
    kv_cache: KVCache = "virtual",
    memory: Memory = None,
    dtype: Dtype = "auto",
    max_num_batched_tokens: BatchedTokens = None,
    seed: Seed = 0,
    repeats: Repeats = 5,
    transformers: Against = False,
    output: Output = None,
) -> None:
    """Time of a decode step, and until the first tokens, by batch size."""
    from aquifer.bench import offline
    from aquifer.bench.floor import Cost
    from aquifer.bench.latency import measure_steps

    options = _options(device, load_format, kv_cache, memory, dtype, max_num_batched_tokens)
    sizes = _batch_sizes(batch_size)
    inputs, outputs = LengthRange.parse(input_len), LengthRange.parse(output_len)
    with _open(model, options, max(sizes), seed) as llm:
        (info,) = llm.engine.models.values()
        peer = offline.load_transformers(llm) if transformers else None
        batches = [
            measure_steps(
                llm,
                Workload.random(size, inputs, outputs, info.vocab_size, seed),
                repeats,
                everything_mapped=everything_mapped,
                transformers=peer,
            )
            for size in sizes
        ]
        described, cost = _describe("latency", llm, options), Cost.of(llm)
    rates = _rates(described)
    figures = {
        **described,
        "input_len": input_len,
        "output_len": output_len,
        "everything_mapped": everything_mapped,
        "seed": seed,
        "batches": [batch.figures(cost, rates) for batch in batches],
    }
    table = _table(_title(figures))
    for column in ("batch", "ms/step", "mean", "p99", "floor", "of floor", "first tokens, s"):
        table.add_column(column, justify="right")
    table.add_column("output tok/s", justify="right")
    for batch in figures["batches"]:
        ours = batch["aquifer"]
        table.add_row(
            str(batch["num_prompts"]),
            *(f"{ours['step_ms'][key]:.3f}" for key in ("median", "mean", "p99")),
            f"{batch['floor_ms_per_token']:.3f}",
            f"{batch['times_floor']:.2f} x, {1 / batch['times_floor']:.0%}",
            f"{summarize(ours['first_tokens_seconds'])['median']:.3f}",
            f"{ours['output_throughput']:.1f}",
        )
        if "transformers" in batch:
            theirs = batch["transformers"]
            # All of its time by token: prompts included.
            per_token_ms = 1e3 * batch["num_prompts"] / theirs["output_throughput"]
            table.add_row("Transf.", "", f"{per_token_ms:.3f}", "", "", "", "", _rate(theirs))
    table.caption = f"floor: weights and KV read once, at {_rates_text(rates)}"
    if transformers:
        table.caption += "".join(
            f"\nbatch {batch['num_prompts']}: {_against(batch)}" for batch in figures["batches"]
        )
    _finish(table, figures, output)


@app.command()
def prefill(
    model: ModelArgument,
    num_prompts: Annotated[int, typer.Option(help="Requests, all there at the start.", min=1)] = 16,
    input_len: InputLen = "512",
    device: Device = "auto",
    load_format: LoadFormat = "auto",
    kv_cache: KVCache = "virtual",
    memory: Memory = None,
    dtype: Dtype = "auto",
    max_num_batched_tokens: BatchedTokens = None,
    seed: Seed = 0,
    repeats: Repeats = 3,
    output: Output = None,
) -> None:
    """Prompt tokens a second, of requests that end with their first token."""
    from aquifer.bench import offline
    from aquifer.bench.floor import Cost

    options = _options(device, load_format, kv_cache, memory, dtype, max_num_batched_tokens)
    inputs = LengthRange.parse(input_len)
    with _open(model, options, num_prompts, seed) as llm:
        (info,) = llm.engine.models.values()
        workload = Workload.random(num_prompts, inputs, LengthRange(1, 1), info.vocab_size, seed)
        ours, _ = offline.compare(llm, workload, repeats)
        described, cost = _describe("prefill", llm, options), Cost.of(llm)
    rates = _rates(described)
    figures = {
        **described,
        "input_len": input_len,
        "seed": seed,
        **offline.prefill_figures(workload, ours, cost, rates),
    }
    table = _table(_title(figures))
    for column in ("", "prompt tok/s", "s", "runs"):
        table.add_column(column, justify="right" if column else "left")
    series = figures["aquifer"]
    table.add_row(
        "Aquifer",
        f"{series['prompt_throughput']:.0f}",
        f"{series['duration']:.3f}",
        _runs(series),
    )
    table.add_row(
        "floor",
        f"{figures['floor_prompt_throughput']:.0f}",
        f"{figures['floor_seconds']:.3f}",
        f"{rates.operations_per_s / 1e12:.2f} TFLOP/s",
    )
    _finish(table, figures, output)


@app.command()
def start(
    model: ModelArgument,
    device: Device = "auto",
    load_format: LoadFormat = "auto",
    kv_cache: KVCache = "virtual",
    memory: Memory = None,
    dtype: Dtype = "auto",
    repeats: Annotated[int, typer.Option(help="The first may have to compile.", min=1)] = 2,
    output: Output = None,
) -> None:
    """Time from a fresh process to its first token."""
    from aquifer.bench.start import measure_start

    options = _options(device, load_format, kv_cache, memory, dtype, None)
    starts = [measure_start(model, options) for _ in range(repeats)]
    figures = {
        "benchmark": "start",
        "model": model,
        **options,
        "starts": [asdict(times) for times in starts],
    }
    table = _table(f"start of {model}, s")
    for column in ("", "import", "construct", "first token", "whole process", "compiled"):
        table.add_column(column, justify="right" if column else "left")
    for number, times in enumerate(starts, 1):
        seconds = (times.import_s, times.construct_s, times.first_token_s, times.process_s)
        table.add_row(f"run {number}", *(f"{s:.2f}" for s in seconds), str(times.num_compiled))
    _finish(table, figures, output)


@app.command()
def load(
    model: ModelArgument,
    make_bytes: Annotated[
        str | None,
        typer.Option(help="First write random weights of the model's shapes, about so many."),
    ] = None,
    from_pinned: Annotated[
        bool, typer.Option("--from-pinned", help="Also time it from page-locked host memory.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    repeats: Annotated[int, typer.Option(help="The first may read from disk.", min=1)] = 2,
    output: Output = None,
) -> None:
    """How fast a checkpoint's weights come onto the device."""
    import contextlib

    import torch

    from aquifer.bench.load import made_checkpoint, measure_load

    wanted = None if dtype == "auto" else getattr(torch, dtype)
    with contextlib.ExitStack() as resources:
        path = ModelSpec.parse(model).path
        if make_bytes is not None:
            path = resources.enter_context(made_checkpoint(path, parse_size(make_bytes)))
        times = measure_load(path, device, wanted, repeats, from_pinned=from_pinned)
    figures = {"benchmark": "load", "model": model, "make_bytes": make_bytes, **asdict(times)}
    table = _table(f"{times.num_bytes / 1e9:.2f} GB of weights onto {times.device}")
    for column in ("", "s", "GB/s"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("pages created and mapped", f"{times.pages_s:.3f}", "")
    rows = {"files": times.load_s, "page-locked memory": times.pinned_s}
    for name, series in rows.items():
        for number, seconds in enumerate(series, 1):
            rate = f"{times.num_bytes / seconds / 1e9:.1f}"
            table.add_row(f"from {name}, run {number}", f"{seconds:.3f}", rate)
    _finish(table, figures, output)


@app.command()
def soak(
    model: ModelArgument,
    num_requests: Annotated[int, typer.Option(help="Random ones of every kind.", min=1)] = 20_000,
    max_tokens: Annotated[int, typer.Option(help="Of a prompt and its output.", min=8)] = 64,
    num_seqs: Annotated[int, typer.Option(help="That run at once.", min=1)] = 16,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the pool has room for; default 3 x max-tokens.")
    ] = None,
    page_size: Annotated[str, typer.Option(help="Size of a page.")] = "16KiB",
    preemption_mode: Annotated[str, typer.Option(help="auto, swap or recompute.")] = "auto",
    device: Device = "auto",
    load_format: LoadFormat = "auto",
    kv_cache: KVCache = "virtual",
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Many random requests against a pool that is too small, with clients that leave.

    Everybody must be answered or refused, and every page accounted for in the end.
    """
    from aquifer.bench.soak import soak as run_soak
    from aquifer.engine.llm import LLM
    from aquifer.engine.progress import counting_bar

    options: dict[str, Any] = {
        "device": device,
        "load_format": load_format,
        "kv_cache": kv_cache,
        "preemption_mode": preemption_mode,
        "max_num_seqs": num_seqs,
        "max_model_len": max_tokens,
        "seed": seed,
    }
    kv_tokens = kv_tokens or 3 * max_tokens
    with LLM(model, **options) as llm:
        (info,) = llm.engine.models.values()
        taken_bytes = llm.memory().overhead_bytes + info.weight_bytes
    options["page_size"] = page_size
    kv_bytes = kv_tokens * info.kv_bytes_per_token + parse_size(page_size)
    options["memory"] = taken_bytes + kv_bytes
    with LLM(model, **options) as llm, counting_bar(True) as progress:
        described = _describe("soak", llm, options)
        task = progress.add_task("requests", total=num_requests)
        result = run_soak(
            llm, num_requests, max_tokens, seed, lambda sent: progress.update(task, completed=sent)
        )
    table = _table(f"{num_requests} requests, room for {kv_tokens} tokens of KV")
    table.add_column("")
    table.add_column("", justify="right")
    refused = sum(result.refused.values())
    for name, value in (
        ("answered", result.num_answered),
        ("refused, with a reason", refused),
        ("whose client left", result.num_left),
        ("completions", result.num_completions),
        ("output tokens", result.num_output_tokens),
        ("prompt tokens found in the cache", result.num_cached_tokens),
        ("preemptions", result.num_preemptions),
        ("of these swapped", result.num_swaps),
        ("pages not accounted for", 0),
        ("seconds", round(result.seconds)),
    ):
        table.add_row(name, f"{value:,}")
    figures = {**described, "kv_tokens": kv_tokens, "max_tokens": max_tokens, **asdict(result)}
    _finish(table, figures, output)


@app.command()
def overhead(
    num_seqs: Annotated[int, typer.Option(help="Running sequences.")] = 256,
    num_steps: Annotated[int, typer.Option(help="Decode steps of each round.")] = 256,
    num_layers: Annotated[int, typer.Option(help="Layers of the KV layout.")] = 12,
    num_kv_heads: Annotated[int, typer.Option(help="KV heads of the KV layout.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Head dimension of the KV layout.")] = 64,
    page_size: Annotated[str, typer.Option(help="Size of a page.")] = "256KiB",
    output: Output = None,
) -> None:
    """What scheduler and cache cost a step, with no model behind them."""
    from aquifer.bench.overhead import measure_steps, random_layout

    layout = random_layout(num_layers, num_kv_heads, head_dim)
    table = _table(f"{num_seqs} running sequences, ms a step")
    for column in ("", "median", "p99", "plan", "view", "commit"):
        table.add_column(column, justify="right" if column else "left")
    figures: dict[str, Any] = {
        "benchmark": "overhead",
        "num_seqs": num_seqs,
        "num_steps": num_steps,
        "kv_bytes_per_token": layout.token_bytes,
        "page_bytes": parse_size(page_size),
        "managers": {},
    }
    for name in ("virtual", "paged"):
        rounds = measure_steps(name, layout, num_seqs, num_steps, parse_size(page_size))
        figures["managers"][name] = {}
        for round_name, costs in rounds.items():
            total = {k: v * 1e3 for k, v in summarize(costs.total_s()).items()}
            parts = [costs.plan_s, costs.view_s, costs.commit_s]
            cells = [total["median"], total["p99"], *(np.median(part) * 1e3 for part in parts)]
            pages = "new pages" if round_name == "first" else "pages used before"
            table.add_row(f"{name}, {pages}", *(f"{cell:.3f}" for cell in cells))
            figures["managers"][name][round_name] = {
                **{f"{k}_step_ms": v for k, v in total.items()},
                "seconds": asdict(costs),
            }
    _finish(table, figures, output)


def replay(
    trace: Annotated[
        Path, typer.Argument(help="A trace or a list of lengths: see docs/replay.md.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A known shape or a folder with a config.json, or NAME=SHAPE; repeatable."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="a100-40g, a100-80g or h200; 4xa100-40g is four.")] = (
        "a100-40g"
    ),
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take the device's speed from a result of bench latency."
        ),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            help="One or several of virtual, paged, orca-max, orca-pow2, orca-oracle, static."
        ),
    ] = "virtual",
    memory: Memory = None,
    rate: Annotated[
        float | None, typer.Option(help="Poisson arrivals a second; default: as recorded.", min=0)
    ] = None,
    rates: Annotated[str | None, typer.Option(help="Several rates: 1,2,4.")] = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate within the bound.")
    ] = False,
    latency_bound: Annotated[
        float, typer.Option(help="Of mean latency by output token, in seconds.", min=0)
    ] = 0.2,
    num_requests: Annotated[
        int | None, typer.Option(help="How many; default: all of the trace, once.", min=1)
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Completions of each prompt.", min=1)] = 1,
    beam_width: Annotated[int, typer.Option(help="Beam search; 0 is sampling.", min=0)] = 0,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep KV for later requests.",
        ),
    ] = False,
    preemption_mode: Annotated[str, typer.Option(help="swap, recompute or auto.")] = "auto",
    swap_space: Annotated[str, typer.Option(help="Host memory for preempted requests.")] = "4GiB",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.", min=1)] = 16,
    page_size: Annotated[str, typer.Option(help="Of a physical page.")] = "2MiB",
    max_model_len: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Longest context; default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step.", min=1)] = 8192,
    cut: Annotated[
        bool,
        typer.Option("--cut", help="Cut requests that are too long, instead of leaving them out."),
    ] = False,
    outputs_of: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which outputs of a list that has several.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    output: Output = None,
    save_requests: Annotated[
        bool, typer.Option("--save-requests", help="Write each request's times to it too.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plot, such as out.png.")
    ] = None,
) -> None:
    """Replay a trace on a modelled device: which cache, how much memory, what rate?"""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from aquifer.bench import replay as bench
    from aquifer.engine.policies import RestoreMode
    from aquifer.sim.device import calibrate as calibrate_device
    from aquifer.sim.device import find_device, find_model
    from aquifer.sim.replay import MANAGERS, ReplayConfig
    from aquifer.sim.trace import fit_lengths, read_trace

    if sum((rate is not None, rates is not None, find_rate)) > 1:
        raise ConfigError("give one of --rate, --rates and --find-rate")
    if rate is not None and not rate > 0:
        raise ConfigError(f"--rate is {rate}; it must be above 0, such as 2.0")
    if preemption_mode not in get_args(RestoreMode):
        raise ConfigError(
            f"--preemption-mode is {preemption_mode!r}; choose {', '.join(get_args(RestoreMode))}"
        )
    managers = kv_cache.split(",")
    for name in managers:
        if name not in MANAGERS:
            raise ConfigError(f"--kv-cache {name!r} is unknown; choose from {', '.join(MANAGERS)}")
    models = {}
    for text in model or ["opt-13b"]:
        name, _, shape = text.rpartition("=")
        models[name or shape] = find_model(shape)
    first = next(iter(models.values()))
    modelled = find_device(device)
    if calibrate is not None:
        modelled = calibrate_device(modelled, first, calibrate)
    config = ReplayConfig(
        models=models,
        device=modelled,
        manager=managers[0],
        memory_bytes=None if memory is None else parse_size(memory),
        page_bytes=parse_size(page_size),
        block_size=block_size,
        max_model_len=None if max_model_len is None else parse_size(max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_samples=num_samples,
        beam_width=beam_width,
        prefix_caching=prefix_caching,
        preemption_mode=cast("RestoreMode", preemption_mode),
        swap_space_bytes=parse_size(swap_space),
        seed=seed,
    )
    context = max(map(config.context, models.values()))
    requests, num_changed = fit_lengths(read_trace(trace, outputs_of=outputs_of), context, cut=cut)
    if not requests:
        raise ConfigError(f"no request of {trace} fits {context} tokens; try --cut")
    workload = bench.Workload(requests, num_requests or len(requests), seed)
    console = Console()
    start_s = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def advance(what: str, num_ended: int, total: int) -> None:
            progress.update(task, description=what, completed=num_ended, total=total)

        if find_rate:
            runs = [
                run
                for name in managers
                for run in bench.find_rate(
                    replace(config, manager=name), workload, latency_bound, advance
                )
            ]
        else:
            wanted: list[float | None] = [rate]
            if rates is not None:
                wanted = [*_rate_list(rates)]
            runs = bench.compare(config, managers, workload, wanted, advance)
    simulated = sum(run.num_tokens for run in runs) / (time.perf_counter() - start_s)
    title = (
        f"{trace.name}: {workload.num_requests} requests, {' and '.join(models)} on "
        f"{modelled.name}, {format_size(runs[0].result.kv_budget_bytes)} for KV"
    )
    table = _table(title)
    table.box = None  # so that it fits 80 columns
    for column in ("KV cache", "req/s", "s/token", "TTFT, s", "TPOT, ms", "tok/s", "batched"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    for column in ("waste", "preempt", *(["hits"] if prefix_caching else [])):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(*_replay_row(run, run.figures()))
    table.caption = "s/token: mean latency by output token; tok/s: outputs"
    table.caption += "\nTTFT, TPOT: 99th percentile and median"
    if num_changed:
        what = "cut" if cut else "left out"
        table.caption += f"\n{num_changed} requests of more than {context} tokens were {what}"
    best = {
        name: bench.sustained_rate([r for r in runs if r.manager == name], latency_bound)
        for name in managers
    }
    figures = {
        "benchmark": "replay",
        "trace": trace.name,
        "num_requests": workload.num_requests,
        "num_too_long": num_changed,
        "models": {name: shape.name for name, shape in models.items()},
        "device": asdict(modelled),
        "memory_bytes": config.budget_bytes,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "page_bytes": config.page_bytes,
        "num_samples": num_samples,
        "beam_width": beam_width,
        "prefix_caching": prefix_caching,
        "preemption_mode": preemption_mode,
        "seed": seed,
        "latency_bound": latency_bound,
        "sustained_rate": best,
        "simulated_tokens_per_second": simulated,
        "runs": [run.figures(with_requests=save_requests) for run in runs],
    }
    if plot is not None:
        bench.plot(runs, plot, title)
    _finish(table, figures, output)
    console.print(f"{simulated:,.0f} tokens of prompts and outputs simulated each second")
    for name, most in best.items():
        if most is not None:
            what = "highest rate" if find_rate else "highest of these rates"
            console.print(f"{name}: {most:.3g} requests/s is the {what} within the bound")


def _rate_list(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise ConfigError(f"--rates is {text!r}; write 1,2,4")
    return found


def _replay_row(run: Run, figures: dict[str, Any]) -> list[str]:
    """One line of the table of `replay`."""
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


def _options(
    device: str,
    load_format: str,
    kv_cache: str,
    memory: str | None,
    dtype: str,
    max_num_batched_tokens: int | None,
) -> dict[str, Any]:
    """Of `LLM`."""
    return {
        "device": device,
        "load_format": load_format,
        "kv_cache": kv_cache,
        "memory": memory,
        "dtype": dtype,
        "max_num_batched_tokens": max_num_batched_tokens,
    }


def _open(model: str, options: dict[str, Any], num_seqs: int, seed: int) -> LLM:
    """An engine in which so many sequences can run at once; the seed is of sampling."""
    from aquifer.engine.llm import LLM

    # Repeats have the same prompts: each is to compute them.
    options = {**options, "enable_prefix_caching": False}
    return LLM(model, **options, max_num_seqs=max(num_seqs, 256), seed=seed)


def _describe(benchmark: str, llm: LLM, options: dict[str, Any]) -> dict[str, Any]:
    """What was measured, for the result's file; before the engine is closed."""
    (info,) = llm.engine.models.values()
    return {
        "benchmark": benchmark,
        "model": info.name,
        "num_parameters": info.num_parameters,
        **options,
        "dtype": info.dtype,
        "device": str(llm.engine.pool.driver.device),
    }


def _rates(described: dict[str, Any]) -> Rates:
    """What the device does at best, measured now that the engine has given its memory back."""
    import torch

    from aquifer.bench.floor import Rates

    rates = Rates.measure(torch.device(described["device"]), getattr(torch, described["dtype"]))
    described["read_bandwidth"] = rates.bytes_per_s
    described["matmul_rate"] = rates.operations_per_s
    return rates


def _rates_text(rates: Rates) -> str:
    return f"{rates.bytes_per_s / 1e9:.1f} GB/s and {rates.operations_per_s / 1e12:.2f} TFLOP/s"


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--batch-size is {text!r}; write 1 or 1,32,128")
    return sizes


def _title(figures: dict[str, Any]) -> str:
    return (
        f"{figures['benchmark']}: {figures['num_parameters'] / 1e6:.0f} M parameters, "
        f"{figures['dtype']}, {figures['kv_cache']} cache, on {figures['device']}"
    )


def _add_series(table: Table, name: str, series: dict[str, Any]) -> None:
    prompt_rate = f"{series['prompt_throughput']:.1f}"
    table.add_row(name, _rate(series), prompt_rate, f"{series['duration']:.2f}", _runs(series))


def _rate(series: dict[str, Any]) -> str:
    return f"{series['output_throughput']:.1f}"


def _runs(series: dict[str, Any]) -> str:
    return ", ".join(f"{seconds:.2f} s" for seconds in series["seconds"])


def _against(figures: dict[str, Any]) -> str:
    return (
        f"{figures['ratio']:.2f} times Transformers; {figures['equal_outputs']} of "
        f"{figures['num_prompts']} outputs equal to the last token"
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left")


def _finish(table: Table, figures: dict[str, Any], output: Path | None) -> None:
    console = Console()
    console.print(table)
    if output is not None:
        save(output, figures)
        console.print(f"written to {output}")
