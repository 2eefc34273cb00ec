"""Results of `aquifer bench` as tables and files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from aquifer.bench.result import check_writable, save
from aquifer.option import Option
from aquifer.parameters import with_options

if TYPE_CHECKING:
    from aquifer.bench.floor import Rates
    from aquifer.llm import LLM


def measures(
    options: Sequence[Option],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command, as `with_options` does; the file of --output is checked first."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*args: Any, options: SimpleNamespace, **given: Any) -> None:
            if options.output is not None:
                check_writable(options.output, "--output")
            command(*args, options=options, **given)

        return with_options(options)(run)

    return decorate


def describe(benchmark: str, llm: LLM, options: dict[str, Any]) -> dict[str, Any]:
    """Model, device and options, for the result's file. Needs the engine open."""
    (info,) = llm.engine.models.values()
    return {
        "benchmark": benchmark,
        "model": info.name,
        "num_parameters": info.num_parameters,
        **options,
        "dtype": info.dtype,
        "device": str(llm.engine.pool.driver.device),
    }


def measure_rates(described: dict[str, Any]) -> Rates:
    """Measure the device's peak rates and add them to `described`.

    To be called once the engine has given its memory back.
    """
    import torch

    from aquifer.bench.floor import Rates

    rates = Rates.measure(torch.device(described["device"]), getattr(torch, described["dtype"]))
    described["read_bandwidth"] = rates.bytes_per_s
    described["matmul_rate"] = rates.operations_per_s
    return rates


def rates_text(rates: Rates) -> str:
    """The device's rates, for a table's caption."""
    return f"{rates.bytes_per_s / 1e9:.1f} GB/s and {rates.operations_per_s / 1e12:.2f} TFLOP/s"


def title(figures: dict[str, Any]) -> str:
    """The title of a result's table."""
    return (
        f"{figures['benchmark']}: {figures['num_parameters'] / 1e6:.0f} M parameters, "
        f"{figures['dtype']}, {figures['kv_cache']} cache, on {figures['device']}"
    )


def add_series(table: Table, name: str, series: dict[str, Any]) -> None:
    """Add a row: throughput of outputs and prompts, duration, and every run."""
    prompt_rate = f"{series['prompt_throughput']:.1f}"
    table.add_row(
        name, output_rate(series), prompt_rate, f"{series['duration']:.2f}", run_seconds(series)
    )


def output_rate(series: dict[str, Any]) -> str:
    """Output tokens a second."""
    return f"{series['output_throughput']:.1f}"


def run_seconds(series: dict[str, Any]) -> str:
    """Seconds of every run."""
    return ", ".join(f"{seconds:.2f} s" for seconds in series["seconds"])


def comparison(figures: dict[str, Any]) -> str:
    """The result beside that of Transformers."""
    return (
        f"{figures['ratio']:.2f} times Transformers; {figures['equal_outputs']} of "
        f"{figures['num_prompts']} outputs equal to the last token"
    )


def new_table(title: str) -> Table:
    """A table without rows."""
    return Table(title=title, title_justify="left", caption_justify="left")


def finish(table: Table, figures: dict[str, Any], output: Path | None) -> None:
    """Print the table, and write the figures to a file if one is given."""
    console = Console()
    console.print(table)
    if output is not None:
        save(output, figures)
        console.print(f"written to {output}")
