"""vAttention's tables and figures, measured with Aquifer.

    python benchmarks/vattention/run.py --output benchmarks/vattention [--parts calls,waste]

Each part runs in a process of its own and writes PART.json, most also PART.png; `tables.py` makes
the tables of README.md from the files. A part begins no measurement after `--limit` seconds; what
was left out is in its file. The parts:

- calls, bandwidth: the memory driver's calls and rates of allocation, by page size;
- waste: tokens of a page, and what a request wastes at most, computed;
- overlap, reclamation: what mapping pages costs decode steps and prompts;
- page_sizes: attention kernels by page size;
- batch: the largest batch of a replayed trace, by page size; needs `--data`;
- prefill, decode, makespan: contiguous against paged KV in the engine;
- targets: long prompts, and prompts that share KV.

With `--device cpu`, models and sizes are small: that shows that the parts run, and nothing else.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from benchmarks.vattention import (
    batch,
    driver,
    growth,
    kernels,
    plots,
    serving,
    tables,
    targets,
    waste,
)
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import Settings, of_device
from rich.console import Console
from rich.markdown import Markdown

PARTS: dict[str, Callable[[Settings, Record], None]] = {
    "calls": driver.calls,
    "bandwidth": driver.bandwidth,
    "waste": waste.measure,
    "overlap": growth.overlap,
    "reclamation": growth.reclamation,
    "page_sizes": kernels.page_sizes,
    "batch": batch.measure,
    "prefill": serving.prefill,
    "decode": serving.decode_steps,
    "makespan": serving.makespan,
    "targets": targets.measure,
}

TRACE = "azure_llm_2023_conv.csv.gz"

_SLACK_S = 120  # for the start of a part, and its last measurement


def run_part(part: str, settings: Settings, output: Path) -> Record:
    """Measure a part in this process, write its file, and draw it."""
    record = Record(part, output / f"{part}.json", settings.limit_s)
    record.content["device"] = settings.device
    PARTS[part](settings, record)
    record.save()
    plots.draw(record.content, output / f"{part}.png")
    return record


def _process(part: str, settings: Settings, output: Path) -> None:
    """Main function of a part's process."""
    faulthandler.dump_traceback_later(settings.limit_s + _SLACK_S - 5)
    if settings.on_gpu and torch.cuda.is_available():
        torch.cuda.init()  # the result names the GPU
    if not settings.on_gpu:
        torch.set_num_threads(1)  # for kernels alone; engines choose for themselves
    run_part(part, settings, output)
    faulthandler.cancel_dump_traceback_later()


def run_in_process(part: str, settings: Settings, output: Path) -> bool:
    """Measure a part in a process of its own, which is killed if it hangs; whether it succeeded."""
    arguments = (part, settings, output)
    process = multiprocessing.get_context("spawn").Process(target=_process, args=arguments)
    process.start()
    process.join(settings.limit_s + _SLACK_S)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode == 0


def integers(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas."""
    return tuple(int(each) for each in text.split(","))


def parse(arguments: list[str]) -> tuple[list[str], Settings, Path]:
    """The parts, the settings, and the folder of the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu for small sizes")
    parser.add_argument("--data", type=Path, help="folder of the traces, or a trace")
    parser.add_argument("--limit", type=float, help="seconds of a part")
    parser.add_argument("--requests", type=int, help="requests of `makespan`; 50 in the paper")
    parser.add_argument("--contexts", type=integers, help="their tokens, such as 32768,65536")
    parser.add_argument("--ratios", type=integers, help="their prompt by their output tokens")
    parser.add_argument("--replayed", type=int, help="requests of `batch`")
    found = parser.parse_args(arguments)
    parts = found.parts.split(",")
    if not {*parts} <= {*PARTS}:
        parser.error(f"parts are {', '.join(PARTS)}")
    if "batch" in parts and found.data is None:
        if found.parts == parser.get_default("parts"):
            parts.remove("batch")
        else:
            parser.error("the part batch needs --data")
    given = {
        "limit_s": found.limit,
        "num_requests": found.requests,
        "makespan_contexts": found.contexts,
        "ratios": found.ratios,
        "trace_requests": found.replayed,
        "trace": None if found.data is None else trace_of(found.data),
    }
    settings = of_device(found.device)
    chosen = {name: value for name, value in given.items() if value is not None}
    return parts, replace(settings, **chosen), found.output


def trace_of(data: Path) -> Path:
    """The trace to replay: the conversation trace of a folder, or the file itself."""
    return data / TRACE if data.is_dir() else data


def without_folders(arguments: list[str]) -> list[str]:
    """The arguments with FOLDER in place of a path."""
    before = [None, *arguments]
    return [
        "FOLDER" if flag in ("--data", "--output") else argument
        for flag, argument in zip(before, arguments, strict=False)
    ]


def main() -> None:
    """Measure the requested parts one after the other, then print their tables."""
    parts, settings, output = parse(sys.argv[1:])
    # The result files record the command; the user's folders do not belong there.
    sys.argv = [sys.argv[0], *without_folders(sys.argv[1:])]
    console = Console(width=120)
    failed = []
    for part in parts:
        start_s = time.perf_counter()
        is_done = run_in_process(part, settings, output)
        seconds = time.perf_counter() - start_s
        if not is_done:
            failed.append(part)
        console.print(f"{part}: {'done' if is_done else 'FAILED'} after {seconds:.1f} s")
    for part in parts:
        file = output / f"{part}.json"
        if part not in failed and file.is_file():
            console.print(Markdown(f"## {part}\n\n{tables.table(tables.read(file))}"))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
