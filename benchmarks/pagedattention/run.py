"""Replay of the figures of PagedAttention's evaluation on a modelled device.

    python benchmarks/pagedattention/run.py --data FOLDER --output benchmarks/pagedattention

For each figure it writes the numbers (JSON) and a plot (PNG); README.md compares them with the
paper's. The data folder has the files that `workloads` names.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pagedattention.figures import all_figures
from benchmarks.pagedattention.plots import DRAWN, draw
from benchmarks.pagedattention.replays import Replays

from aquifer.bench.result import save

_HERE = Path(__file__).resolve().parent
_KERNELS = _HERE.parent / "gpu" / "decode_attention.json"


def main() -> None:
    """Replay all figures, or those of `--only`."""
    figures = all_figures(_KERNELS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--keep", type=Path, help="file of finished jobs, to go on after a stop")
    parser.add_argument("--only", nargs="*", choices=list(figures), help="replay these figures")
    arguments = parser.parse_args()
    # The result files record the command; the user's data folder does not belong there.
    sys.argv = [sys.argv[0], "--data", "FOLDER"]
    with Replays(arguments.data, arguments.jobs, arguments.keep) as replays:
        for name in arguments.only or figures:
            begin_s = time.perf_counter()
            content = figures[name](replays)
            save(arguments.output / f"{name}.json", content)
            if content["figure"] in DRAWN:
                draw(content, arguments.output / f"{name}.png")
            print(f"{name}: {time.perf_counter() - begin_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
