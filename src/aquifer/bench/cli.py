"""`aquifer bench`: measurements that print a table and write a file.

What is heavy is imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import save, summarize
from aquifer.bench.workload import LengthRange, Workload
from aquifer.config import ModelSpec, parse_size

if TYPE_CHECKING:
    from aquifer.bench.offline import Series

app = typer.Typer(no_args_is_help=True, help="Measure the engine; each result is also a file.")

ModelArgument = Annotated[str, typer.Argument(help="A checkpoint's path, or a bundled model.")]
InputLen = Annotated[str, typer.Option(help="Prompt tokens: 128, or a range 16-256.")]
OutputLen = Annotated[str, typer.Option(help="Output tokens: 128, or a range 16-256.")]
KVCache = Annotated[str, typer.Option(help="virtual or paged.")]
Memory = Annotated[str | None, typer.Option(help="The pool's budget, such as 4GiB.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option(help="Of the workload.")]
Repeats = Annotated[int, typer.Option(help="Timed runs; the median counts.", min=1)]
Against = Annotated[
    bool, typer.Option("--transformers", help="Also run Transformers' generate, turn by turn.")
]
Output = Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")]


@app.command()
def throughput(
    model: ModelArgument,
    num_prompts: Annotated[int, typer.Option(help="Requests, all there at the start.")] = 32,
    input_len: InputLen = "16-256",
    output_len: OutputLen = "16-256",
    kv_cache: KVCache = "virtual",
    memory: Memory = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    repeats: Repeats = 3,
    transformers: Against = False,
    output: Output = None,
) -> None:
    """Output tokens a second of many requests at once."""
    _run_offline(
        "throughput",
        model,
        num_prompts,
        (input_len, output_len),
        {"kv_cache": kv_cache, "memory": memory, "dtype": dtype},
        seed,
        repeats,
        transformers,
        output,
    )


@app.command()
def latency(
    model: ModelArgument,
    input_len: InputLen = "128",
    output_len: OutputLen = "128",
    kv_cache: KVCache = "virtual",
    memory: Memory = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    repeats: Repeats = 5,
    transformers: Against = False,
    output: Output = None,
) -> None:
    """Time per token of one request alone."""
    _run_offline(
        "latency",
        model,
        1,
        (input_len, output_len),
        {"kv_cache": kv_cache, "memory": memory, "dtype": dtype},
        seed,
        repeats,
        transformers,
        output,
    )


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


def _run_offline(
    benchmark: str,
    model: str,
    num_prompts: int,
    lengths: tuple[str, str],
    options: dict[str, Any],
    seed: int,
    repeats: int,
    transformers: bool,
    output: Path | None,
) -> None:
    from aquifer.bench.floor import read_bandwidth
    from aquifer.bench.offline import compare
    from aquifer.engine.llm import LLM

    inputs, outputs = map(LengthRange.parse, lengths)
    spec = ModelSpec.parse(model)
    with LLM(model, **options) as llm:
        (info,) = llm.engine.models.values()
        workload = Workload.random(num_prompts, inputs, outputs, info.vocab_size, seed)
        ours, theirs = compare(llm, workload, repeats, str(spec.path) if transformers else None)
    figures: dict[str, Any] = {
        "benchmark": benchmark,
        "num_parameters": info.num_parameters,
        "dtype": info.dtype,
        "num_prompts": num_prompts,
        "input_len": lengths[0],
        "output_len": lengths[1],
        "seed": seed,
        **options,
        "total_input_tokens": workload.num_input_tokens,
        "total_output_tokens": workload.num_output_tokens,
        "aquifer": _series(ours, workload),
    }
    if num_prompts == 1:
        # One stream reads all weights for each token.
        bandwidth = read_bandwidth()
        figures["read_bandwidth"] = bandwidth
        figures["floor_ms_per_token"] = 1e3 * info.weight_bytes / bandwidth
    table = _table(f"{benchmark}: {info.num_parameters / 1e6:.0f} M parameters, {info.dtype}")
    for column in ("", "output tok/s", "ms/token", "runs"):
        table.add_column(column, justify="right" if column else "left")
    _add_row(table, "Aquifer", figures["aquifer"], num_prompts)
    if "floor_ms_per_token" in figures:
        floor = f"{figures['floor_ms_per_token']:.2f}"
        table.add_row("floor: weights", "", floor, f"at {figures['read_bandwidth'] / 1e9:.1f} GB/s")
    if theirs is not None:
        figures["transformers"] = _series(theirs, workload)
        figures["ratio"] = (
            figures["aquifer"]["output_throughput"] / figures["transformers"]["output_throughput"]
        )
        figures["equal_outputs"] = sum(
            mine == other for mine, other in zip(ours.completed, theirs.completed, strict=True)
        )
        _add_row(table, "Transformers", figures["transformers"], num_prompts)
        table.caption = (
            f"{figures['ratio']:.2f} times Transformers; "
            f"{figures['equal_outputs']} of {num_prompts} outputs equal to the last token"
        )
    _finish(table, figures, output)


def _series(series: Series, workload: Workload) -> dict[str, Any]:
    seconds = summarize(series.seconds)["median"]
    return {
        "output_throughput": workload.num_output_tokens / seconds,
        "total_token_throughput": (
            (workload.num_input_tokens + workload.num_output_tokens) / seconds
        ),
        "duration": seconds,
        "seconds": series.seconds,
    }


def _add_row(table: Table, name: str, figures: dict[str, Any], num_streams: int) -> None:
    runs = ", ".join(f"{seconds:.2f} s" for seconds in figures["seconds"])
    per_token_ms = 1e3 * num_streams / figures["output_throughput"]
    table.add_row(name, f"{figures['output_throughput']:.1f}", f"{per_token_ms:.2f}", runs)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left")


def _finish(table: Table, figures: dict[str, Any], output: Path | None) -> None:
    console = Console()
    console.print(table)
    if output is not None:
        save(output, figures)
        console.print(f"written to {output}")
