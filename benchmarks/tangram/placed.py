"""Placement on the devices of a server: real engine processes, requests over HTTP.

    python benchmarks/tangram/placed.py --data FOLDER --devices cuda:0,cuda:1 [--output FOLDER]

It serves eight models with random weights, of which a part fits into the pool of each device, and
sends requests with the locality of Tangram's level L3 (section 5.1) at several rates, to a new
server for each placement. FOLDER has the lengths of the requests. It writes `placed.json`;
README.md compares it with Fig. 13 and with the replay.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from benchmarks.tangram.checkpoints import CONFIGS, write_folders
from benchmarks.tangram.mixes import lengths
from rich.progress import Progress

from aquifer.bench.result import save
from aquifer.bench.serving.load import Load, Run, send
from aquifer.bench.serving.server import serving
from aquifer.bench.serving.target import Target
from aquifer.errors import EngineError
from aquifer.sim.locality import LOCALITIES, LocalityWorkload
from aquifer.sim.trace import TraceRequest

_HERE = Path(__file__).resolve().parent
_PLACEMENTS = ("affinity", "least-loaded", "round-robin", "random")
_LEVEL = "L3"
_FIRST_ID = 10  # token ids of prompts: none of them is special
_NUM_IDS = 200
_MAX_SEQS = 64


def load_of(requests: Sequence[TraceRequest]) -> Load:
    """Requests as they are sent: random prompts of the trace's lengths.

    Args:
        requests: with times and models.
    """
    random = np.random.default_rng(0)
    bodies = [
        {
            "model": request.model,
            "prompt": (_FIRST_ID + random.integers(_NUM_IDS, size=request.prompt_tokens)).tolist(),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for request in requests
    ]
    times_s = [request.arrival_s or 0.0 for request in requests]
    return Load("/v1/completions", [json.dumps(body).encode() for body in bodies], times_s)


def figures(run: Run, states: dict[str, Any]) -> dict[str, Any]:
    """Time to first token of one run, and how often each device has loaded models.

    Args:
        run: what became of the requests.
        states: the answer of GET /models after it.
    """
    ttfts_ms = np.array([1e3 * stream.first_token_s for stream in run.streams])
    devices = list(states["models"][0]["devices"])
    return {
        "requests": len(run.streams),
        "failures": len(run.failures),
        "ttft_mean_ms": float(ttfts_ms.mean()),
        "ttft_p50_ms": float(np.percentile(ttfts_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttfts_ms, 99)),
        "loads": {
            device: sum(model["devices"][device]["loads"] for model in states["models"])
            for device in devices
        },
    }


def measure(
    folder: Path,
    arguments: Sequence[str],
    rates: Sequence[float],
    of: Sequence[TraceRequest],
    num: int,
    placements: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Figures by rate and placement; each from a server that has just started.

    Args:
        folder: the models.
        arguments: of `aquifer serve`, without the placement.
        rates: requests a second.
        of: lengths of requests.
        num: requests of each run.
        placements: how requests are placed.

    Yields: all figures so far, after each server.

    Raises:
        EngineError: a server did not start, or refused requests.
    """
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    found: dict[str, Any] = {}
    with Progress() as progress:
        task = progress.add_task("", total=len(rates) * len(placements) * num)
        for rate in rates:
            requests = LocalityWorkload(names, of, rate, num).requests(LOCALITIES[_LEVEL])
            row = found[str(rate)] = {}
            for placement in placements:
                progress.update(task, description=f"{rate:g}/s, {placement}")
                begun_s = time.monotonic()
                with serving(str(folder), [*arguments, "--placement", placement]) as url:
                    start_s = time.monotonic() - begun_s
                    run = send(Target.reach(url), load_of(requests), lambda: progress.advance(task))
                    with urllib.request.urlopen(f"{url}/models") as answer:
                        states = json.load(answer)
                if run.failures:
                    raise EngineError(f"a request failed: {run.failures[0].message}")
                row[placement] = {"start_s": start_s, **figures(run, states)}
                yield found


def main() -> None:
    """Measure the placements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the lengths")
    parser.add_argument("--devices", required=True, help="such as cuda:0,cuda:1")
    parser.add_argument("--memory", default="40GiB", help="of each device's pool")
    parser.add_argument("--models", type=Path, help="folder of models; eight random ones if not")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.6, 6.4])
    parser.add_argument("--requests", type=int, default=150, help="requests of each run")
    parser.add_argument("--placements", nargs="+", default=_PLACEMENTS, choices=_PLACEMENTS)
    parser.add_argument("--most-tokens", type=int, default=1024, help="of a prompt or an output")
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    arguments = parser.parse_args()
    most = arguments.most_tokens
    of = [
        TraceRequest(None, min(each.prompt_tokens, most), min(each.output_tokens, most))
        for each in lengths(arguments.data)
    ]
    options = ["--devices", arguments.devices, "--memory", arguments.memory]
    # No larger than needed: each size of a step is prepared before a server is ready.
    options += ["--max-model-len", str(2 * most), "--max-num-batched-tokens", str(2 * most)]
    options += ["--max-num-seqs", str(_MAX_SEQS)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.models
        if folder is None:
            folder = Path(scratch)
            write_folders(folder, CONFIGS)
            options += ["--load-format", "dummy"]
        command = f"benchmarks/tangram/placed.py --data DATA --devices {arguments.devices}"
        for rates in measure(
            folder, options, arguments.rates, of, arguments.requests, arguments.placements
        ):
            content = {"devices": arguments.devices, "memory": arguments.memory, "rates": rates}
            save(arguments.output / "placed.json", content, command=command)


if __name__ == "__main__":
    main()
