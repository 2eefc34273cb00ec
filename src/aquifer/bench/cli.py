"""`aquifer bench`: measurements that print a table and write a file.

Heavy packages are imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from aquifer.bench import options as table_of
from aquifer.bench.report import (
    add_series,
    comparison,
    describe,
    finish,
    measure_rates,
    measures,
    new_table,
    output_rate,
    rates_text,
    run_seconds,
    title,
)
from aquifer.bench.result import summarize
from aquifer.bench.serving.command import ServeCommand, serve
from aquifer.bench.workload import LengthRange, Workload
from aquifer.config import EngineConfig, ModelSpec, field_values
from aquifer.errors import ConfigError
from aquifer.hub import locate
from aquifer.parameters import ModelArgument, values_for

if TYPE_CHECKING:
    from aquifer.llm import LLM

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the engine, or a server; --output writes the result to a file too.",
)
app.command("serve", cls=ServeCommand)(serve)


@app.command()
@measures(table_of.THROUGHPUT)
def throughput(model: ModelArgument, options: SimpleNamespace) -> None:
    """Measure output tokens a second of many requests at once."""
    if options.transformers and options.temperature:
        raise ConfigError("--transformers compares greedy outputs; leave --temperature at 0")
    from aquifer.bench import offline
    from aquifer.bench.floor import Cost

    engine = values_for("bench", options)
    inputs, outputs = LengthRange.parse(options.input_len), LengthRange.parse(options.output_len)
    with _open(model, engine, options.num_prompts, options.seed) as llm:
        (info,) = llm.engine.models.values()
        workload = Workload.random(
            options.num_prompts, inputs, outputs, info.vocab_size, options.seed
        )
        peer = offline.load_transformers(llm) if options.transformers else None
        ours, theirs = offline.compare(llm, workload, options.repeats, peer, options.temperature)
        described, cost = describe("throughput", llm, engine), Cost.of(llm)
    rates = measure_rates(described)
    figures = {
        **described,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "temperature": options.temperature,
        "seed": options.seed,
        **offline.figures(workload, ours, theirs, cost, rates),
    }
    table = new_table(title(figures))
    for column in ("", "output tok/s", "prompt tok/s", "s", "runs"):
        table.add_column(column, justify="right" if column else "left")
    for name, key in (("Aquifer", "aquifer"), ("Transformers", "transformers")):
        if key in figures:
            add_series(table, name, figures[key])
    table.add_row(
        "floor",
        f"{figures['floor_output_throughput']:.1f}",
        "",
        f"{figures['floor_seconds']:.2f}",
        "",
    )
    table.caption = f"floor: weights and KV at {rates_text(rates)}"
    if theirs is not None:
        table.caption += f"\n{comparison(figures)}"
    finish(table, figures, options.output)


@app.command()
@measures(table_of.LATENCY)
def latency(model: ModelArgument, options: SimpleNamespace) -> None:
    """Measure the time of a decode step and to the first tokens, by batch size."""
    from aquifer.bench import offline
    from aquifer.bench.floor import Cost
    from aquifer.bench.latency import measure_steps

    engine = values_for("bench", options)
    sizes = _numbers("--batch-size", options.batch_size, least=1)
    inputs, outputs = LengthRange.parse(options.input_len), LengthRange.parse(options.output_len)
    with _open(model, engine, max(sizes), options.seed) as llm:
        (info,) = llm.engine.models.values()
        peer = offline.load_transformers(llm) if options.transformers else None
        batches = [
            measure_steps(
                llm,
                Workload.random(size, inputs, outputs, info.vocab_size, options.seed),
                options.repeats,
                everything_mapped=options.everything_mapped,
                transformers=peer,
            )
            for size in sizes
        ]
        described, cost = describe("latency", llm, engine), Cost.of(llm)
    rates = measure_rates(described)
    figures = {
        **described,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "everything_mapped": options.everything_mapped,
        "seed": options.seed,
        "batches": [batch.figures(cost, rates) for batch in batches],
    }
    table = new_table(title(figures))
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
            # Its whole time by token, prompts included.
            per_token_ms = 1e3 * batch["num_prompts"] / theirs["output_throughput"]
            table.add_row("Transf.", "", f"{per_token_ms:.3f}", "", "", "", "", output_rate(theirs))
    table.caption = f"floor: weights and KV read once, at {rates_text(rates)}"
    if options.transformers:
        table.caption += "".join(
            f"\nbatch {batch['num_prompts']}: {comparison(batch)}" for batch in figures["batches"]
        )
    finish(table, figures, options.output)


@app.command()
@measures(table_of.PREFILL)
def prefill(model: ModelArgument, options: SimpleNamespace) -> None:
    """Measure prompt tokens a second, with requests that end at their first token."""
    from aquifer.bench import offline
    from aquifer.bench.floor import Cost

    engine = values_for("bench", options)
    inputs = LengthRange.parse(options.input_len)
    with _open(model, engine, options.num_prompts, options.seed) as llm:
        (info,) = llm.engine.models.values()
        workload = Workload.random(
            options.num_prompts, inputs, LengthRange(1, 1), info.vocab_size, options.seed
        )
        ours, _ = offline.compare(llm, workload, options.repeats)
        described, cost = describe("prefill", llm, engine), Cost.of(llm)
    rates = measure_rates(described)
    figures = {
        **described,
        "input_len": options.input_len,
        "seed": options.seed,
        **offline.prefill_figures(workload, ours, cost, rates),
    }
    table = new_table(title(figures))
    for column in ("", "prompt tok/s", "s", "runs"):
        table.add_column(column, justify="right" if column else "left")
    series = figures["aquifer"]
    table.add_row(
        "Aquifer",
        f"{series['prompt_throughput']:.0f}",
        f"{series['duration']:.3f}",
        run_seconds(series),
    )
    table.add_row(
        "floor",
        f"{figures['floor_prompt_throughput']:.0f}",
        f"{figures['floor_seconds']:.3f}",
        f"{rates.operations_per_s / 1e12:.2f} TFLOP/s",
    )
    finish(table, figures, options.output)


@app.command()
@measures(table_of.START)
def start(model: ModelArgument, options: SimpleNamespace) -> None:
    """Measure the time from a new process to its first token."""
    from aquifer.bench.start import measure_start

    engine = values_for("bench", options)
    found = locate(
        [ModelSpec.parse(model)],
        engine.pop("revision"),
        weights=options.load_format != "dummy",
    )[0]
    text = f"{found.name}={found.path}"  # a start does not ask the hub
    starts = [measure_start(text, engine) for _ in range(options.repeats)]
    figures = {
        "benchmark": "start",
        "model": model,
        **engine,
        "starts": [asdict(times) for times in starts],
    }
    table = new_table(f"start of {model}, s")
    for column in ("", "import", "construct", "first token", "whole process", "compiled"):
        table.add_column(column, justify="right" if column else "left")
    for number, times in enumerate(starts, 1):
        seconds = (times.import_s, times.construct_s, times.first_token_s, times.process_s)
        table.add_row(f"run {number}", *(f"{s:.2f}" for s in seconds), str(times.num_compiled))
    finish(table, figures, options.output)


@app.command()
@measures(table_of.LOAD)
def load(model: ModelArgument, options: SimpleNamespace) -> None:
    """Measure how fast a checkpoint's weights are loaded onto the device."""
    import torch

    from aquifer.bench.load import made_checkpoint, measure_load

    wanted = None if options.dtype == "auto" else getattr(torch, options.dtype)
    with contextlib.ExitStack() as resources:
        (found,) = locate(
            [ModelSpec.parse(model)], options.revision, weights=options.make_bytes is None
        )
        path = found.path
        if options.make_bytes is not None:
            path = resources.enter_context(made_checkpoint(path, options.make_bytes))
        times = measure_load(
            path, options.device, wanted, options.repeats, from_pinned=options.from_pinned
        )
    figures = {
        "benchmark": "load",
        "model": model,
        "make_bytes": options.make_bytes,
        **asdict(times),
    }
    table = new_table(f"{times.num_bytes / 1e9:.2f} GB of weights onto {times.device}")
    for column in ("", "s", "GB/s"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("pages created and mapped", f"{times.pages_s:.3f}", "")
    rows = {"files": times.load_s, "page-locked memory": times.pinned_s}
    for name, series in rows.items():
        for number, seconds in enumerate(series, 1):
            rate = f"{times.num_bytes / seconds / 1e9:.1f}"
            table.add_row(f"from {name}, run {number}", f"{seconds:.3f}", rate)
    finish(table, figures, options.output)


@app.command()
@measures(table_of.SWITCH)
def switch(model: ModelArgument, options: SimpleNamespace) -> None:
    """Measure the time to the first token by where a model's weights are."""
    import torch

    from aquifer.bench.load import made_checkpoint
    from aquifer.bench.switch import figures_of, measure_neighbour, measure_switch, switch_table

    engine = values_for("bench", options)
    with contextlib.ExitStack() as resources:
        (found,) = locate(
            [ModelSpec.parse(model)],
            engine.pop("revision"),
            weights=options.make_bytes is None,
        )
        path = found.path
        if options.make_bytes is not None:
            path = resources.enter_context(made_checkpoint(path, options.make_bytes))
        described: dict[str, Any] = {}

        def open_llm(host_cache_bytes: int) -> LLM:
            text = f"{found.name}={path}"
            llm = _open(text, {**engine, "host_cache": host_cache_bytes}, 1, options.seed)
            described.update(describe("switch", llm, engine))
            return llm

        sizes = options.input_len, options.repeats, options.seed
        places = measure_switch(open_llm, path, *sizes)
        if options.neighbour is not None:
            config = EngineConfig(
                (ModelSpec(found.name, path),),
                **field_values(EngineConfig, {**engine, "seed": options.seed}),
            )
            places += measure_neighbour(config, options.neighbour, *sizes)
    figures = {
        **described,
        "make_bytes": options.make_bytes,
        "input_len": options.input_len,
        "seed": options.seed,
        **figures_of(places, torch.device(described["device"]), options.neighbour),
    }
    table = switch_table(figures)
    finish(table, figures, options.output)


@app.command()
@measures(table_of.SOAK)
def soak(model: ModelArgument, options: SimpleNamespace) -> None:
    """Send many random requests to a pool that is too small, with clients that leave.

    Each request must be answered or refused, and every page accounted for in the end.
    """
    from aquifer.bench.soak import Sample
    from aquifer.bench.soak import soak as run_soak
    from aquifer.llm import LLM
    from aquifer.progress import counting_bar

    engine: dict[str, Any] = {
        "revision": options.revision,
        "device": options.device,
        "load_format": options.load_format,
        "kv_cache": options.kv_cache,
        "preemption_mode": options.preemption_mode,
        "block_size": options.block_size,
        "length_prediction": options.length_prediction,
        "bucket_routing_threshold": options.bucket_routing_threshold,
        "max_num_seqs": options.num_seqs,
        "max_model_len": options.max_tokens,
        "seed": options.seed,
    }
    kv_tokens = options.kv_tokens or 3 * options.max_tokens
    with LLM(model, **engine) as llm:
        (info,) = llm.engine.models.values()
        taken_bytes = llm.memory().overhead_bytes + info.weight_bytes
    kv_bytes = kv_tokens * info.kv_bytes_per_token + options.page_size
    undisturbed = engine | {"kv_cache": "virtual", "length_prediction": "off"}
    del undisturbed["bucket_routing_threshold"]  # of the bucketed cache alone
    engine |= {"page_size": options.page_size, "memory": taken_bytes + kv_bytes}
    sample = Sample(options.compare, options.num_requests)
    with LLM(model, **engine) as llm, counting_bar(True) as progress:
        described = describe("soak", llm, engine)
        task = progress.add_task("requests", total=options.num_requests)
        result = run_soak(
            llm,
            options.num_requests,
            options.max_tokens,
            options.seed,
            lambda sent: progress.update(task, completed=sent),
            lengths=options.lengths,
            sample=sample,
        )
    if options.compare:
        with LLM(model, **undisturbed) as llm:
            result.num_compared = sample.compare(llm)
    table = new_table(f"{options.num_requests} requests, room for {kv_tokens} tokens of KV")
    table.add_column("")
    table.add_column("", justify="right")
    refused = sum(result.refused.values())
    for name, value in (
        ("answered", result.num_answered),
        ("refused, with a reason", refused),
        ("abandoned by the client", result.num_left),
        ("completions", result.num_completions),
        ("output tokens", result.num_output_tokens),
        ("prompt tokens found in the cache", result.num_cached_tokens),
        ("preemptions", result.num_preemptions),
        ("of these swapped", result.num_swaps),
        ("answers equal to those of an undisturbed engine", result.num_compared),
        ("pages not accounted for", 0),
        ("seconds", round(result.seconds)),
    ):
        table.add_row(name, f"{value:,}")
    figures = {
        **described,
        "kv_tokens": kv_tokens,
        "max_tokens": options.max_tokens,
        "lengths": options.lengths,
        **asdict(result),
    }
    finish(table, figures, options.output)


@app.command()
@measures(table_of.OVERHEAD)
def overhead(options: SimpleNamespace) -> None:
    """Measure the time that scheduler and cache take for a step, without a model."""
    from aquifer.bench.overhead import measure_steps, random_layout

    layout = random_layout(options.num_layers, options.num_kv_heads, options.head_dim)
    table = new_table(f"{options.num_seqs} running sequences, ms a step")
    for column in ("", "median", "p99", "plan", "view", "commit"):
        table.add_column(column, justify="right" if column else "left")
    figures: dict[str, Any] = {
        "benchmark": "overhead",
        "num_seqs": options.num_seqs,
        "num_steps": options.num_steps,
        "kv_bytes_per_token": layout.token_bytes,
        "page_bytes": options.page_size,
        "managers": {},
    }
    for name in ("virtual", "paged"):
        rounds = measure_steps(name, layout, options.num_seqs, options.num_steps, options.page_size)
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
    finish(table, figures, options.output)


def _open(model: str, engine: dict[str, Any], num_seqs: int, seed: int) -> LLM:
    """Open an engine in which `num_seqs` sequences can run at once, with a seed for sampling."""
    from aquifer.llm import LLM

    # Every repeat has the same prompts, and must compute them.
    engine = {**engine, "enable_prefix_caching": False}
    return LLM(model, **engine, max_num_seqs=max(num_seqs, 256), seed=seed)


def _numbers(flag: str, text: str, least: int) -> list[int]:
    """Several whole numbers, as in "1,32,128"."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [least - 1]
    if min(numbers) < least:
        raise ConfigError(
            f"{flag} is {text!r}; write numbers from {least} up, such as {least},8,32"
        )
    return numbers
