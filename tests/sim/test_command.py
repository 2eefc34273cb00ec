"""`aquifer replay`, as its users call it."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aquifer.bench import replay as bench
from aquifer.bench import replay_plot
from aquifer.cli import app
from aquifer.errors import ConfigError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    rows = [f"{i / 4},{100 + 150 * (i % 7)},{20 + 9 * (i % 5)}" for i in range(30)]
    file.write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows, "9,2000,100"]))
    return file


def _replay(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_as_recorded(trace, tmp_path):
    output = _replay(trace, "--output", tmp_path / "out.json", "--save-requests")
    assert "virtual" in output
    assert "recorded" in output
    assert "1 requests of more than 2048 tokens were left out" in output
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["benchmark"], result["models"]) == ("replay", {"opt-13b": "opt-13b"})
    (run,) = result["runs"]
    assert (run["completed"], run["request_rate"], run["kv_cache"]) == (30, None, "virtual")
    assert run["requests"]["arrival_s"] == [i / 4 for i in range(30)]
    assert all(run["requests"]["finished_s"])


def test_rates_managers_and_a_plot(trace, tmp_path):
    arguments = ("--rates", "1,16", "--kv-cache", "paged,orca-max", "--num-requests", "40")
    files = ("--output", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    output = _replay(trace, *arguments, *files, "--cut")
    assert "1 requests of more than 2048 tokens were cut" in output
    result = json.loads((tmp_path / "out.json").read_text())
    found = [(run["kv_cache"], run["request_rate"], run["completed"]) for run in result["runs"]]
    assert found == [(name, rate, 40) for name in ("paged", "orca-max") for rate in (1.0, 16.0)]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_memory_in_a_plot_is_all_of_it(trace, tmp_path, monkeypatch):
    shown = []
    plot_memory = replay_plot.plot_memory

    def note(axes: Any, runs: Any) -> None:
        plot_memory(axes, runs)
        shown.append(sum(bar.get_height() for bar in axes.patches))

    monkeypatch.setattr(replay_plot, "plot_memory", note)
    for weights in ("resident", "tensor"):
        _replay(trace, "--plot", tmp_path / "out.png", "--weights", weights)
    assert shown == pytest.approx([100.0, 100.0])


def test_models_that_are_loaded_for_their_requests(tmp_path):
    """Two of them fit into the pool beside each other but for a few tensors."""
    trace = tmp_path / "trace.csv"
    rows = [f"{10 * i},100,4,{'ab'[i % 2]}" for i in range(6)]
    trace.write_text("\n".join(["arrival,prompt_tokens,output_tokens,model", *rows]))
    models = ("--model", "a=opt-1.3b", "--model", "b=opt-1.3b", "--memory", "4700MiB")
    loading = ("--load-gb-per-s", "2", "--output", tmp_path / "out.json")
    loaded_bytes = []
    for weights in ("tensor", "whole"):
        output = _replay(trace, *models, *loading, "--weights", weights)
        assert "virtual: 6 loads of weights" in " ".join(output.split())
        assert "for weights and KV" in " ".join(output.split())
        result = json.loads((tmp_path / "out.json").read_text())
        (run,) = result["runs"]
        assert (run["completed"], run["num_loads"]) == (6, 6)
        assert run["loading_seconds"] == pytest.approx(run["loaded_bytes"] / 2e9)
        assert result["loading"]["is_exclusive"] == (weights == "whole")
        loaded_bytes.append(run["loaded_bytes"])
    assert loaded_bytes[0] < loaded_bytes[1] / 2


def test_find_rate(trace, tmp_path):
    arguments = ("--kv-cache", "virtual,orca-max", "--num-requests", "40", "--memory", "30GiB")
    options = ("--page-size", "32MiB", "--latency-bound", "0.05", "--output", tmp_path / "o.json")
    output = _replay(trace, "--find-rate", *arguments, *options)
    result = json.loads((tmp_path / "o.json").read_text())
    sustained = result["sustained_rate"]
    assert sustained["virtual"] > sustained["orca-max"]
    for run in result["runs"]:
        is_within = run["normalized_latency"] <= 0.05 and run["p99_ttft_ms"] <= 2000
        assert is_within == (run["request_rate"] <= sustained[run["kv_cache"]])
    # The next rate that was tried is hardly higher.
    for name, most in sustained.items():
        assert f"{name}: {most:.3g} requests/s is the highest rate within the bounds" in output
        rates = [run["request_rate"] for run in result["runs"] if run["kv_cache"] == name]
        assert min(rate for rate in rates if rate > most) <= 1.021 * most


def test_a_growing_queue_is_told(trace):
    output = _replay(trace, "--rates", "0.5,20", "--num-requests", "60", "--memory", "26GiB")
    warnings = [line for line in output.splitlines() if line.startswith("warning")]
    assert [line.split(":")[1] for line in warnings] == [" virtual at 20 requests/s"]
    # Of the rates that a search tries, only the one that it finds is judged.
    options = ("--find-rate", "--num-requests", "60", "--memory", "26GiB", "--page-size", "8MiB")
    output = _replay(trace, *options, "--latency-bound", "9", "--ttft-bound", "9")
    assert output.count("warning") == 1


def test_bounds_that_few_requests_never_reach(trace):
    options = ("--find-rate", "--num-requests", "2", "--latency-bound", "9", "--ttft-bound", "9")
    output = " ".join(_replay(trace, *options).split())
    assert (
        "virtual: no bound is reached, up to 1.05e+06 requests/s, the highest rate tried" in output
    )
    assert "highest rate within" not in output


def test_bounds_that_cannot_be_kept(trace):
    options = ("--find-rate", "--latency-bound", "1e-6", "--ttft-bound", "1e-3")
    output = " ".join(_replay(trace, *options).split())
    assert "virtual: no rate is within the bounds; at 4.77e-07/s: latency by output token" in output
    assert ", p99 TTFT" in output


def test_lengths_of_several_authors(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"instructions": ["a b c"], "output_tokens": {"x": [8]}}))
    assert "4" in _replay(file, "--rate", "3", "--outputs-of", "x", "--num-requests", "5")
    with pytest.raises(ConfigError, match="give a --rate"):
        _replay(file, "--outputs-of", "x")


def _latency_result(folder: Path) -> Path:
    """A result of `aquifer bench latency`, of an 8B on an H200."""
    file = folder / "latency.json"
    series = {"step_ms": {"median": 9.0}, "first_tokens_seconds": [0.1]}
    batch = {"num_prompts": 1, "total_input_tokens": 9, "total_output_tokens": 9, "aquifer": series}
    content = {
        "environment": {"gpu": {"name": "NVIDIA H200"}},
        "model": "8b",
        "num_parameters": 8_030_000_000,
        "dtype": "bfloat16",
        "read_bandwidth": 4e12,
        "matmul_rate": 7e14,
        "batches": [batch, batch],
    }
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 1 --find-rate", "give one of --rate, --rates and --find-rate"),
        ("--rate 0", "--rate is 0.0; it must be a number above 0, such as 2.0"),
        ("--rate nan", "--rate is nan"),
        ("--rates nan", "--rates is 'nan'; write 1,2,4"),
        ("--rates 1,x", "--rates is '1,x'; write 1,2,4"),
        ("--rates 1,nan", "--rates is '1,nan'"),
        ("--find-rate --ttft-bound nan", "--ttft-bound is nan"),
        ("--beam-width 4 --num-samples 2", "give one of --num-samples and --beam-width"),
        ("--num-samples 40 --max-num-seqs 16", "--num-samples is 40; .* --max-num-seqs, .* 16"),
        ("--beam-width 17 --max-num-seqs 16", "--beam-width is 17; .* --max-num-seqs, .* 16"),
        ("--num-samples 129", "--num-samples is 129; it must be at most 128"),
        ("--num-requests 31", "--num-requests is 31; the trace has 30 requests"),
        ("--seed -1", "--seed is -1; it must be a whole number of at least 0, such as 0"),
        ("--page-size 0", "--page-size is 0; it must be a size of at least 4096, such as 2MiB"),
        ("--page-size 1", "--page-size is 1; it must be a size of at least 4096"),
        ("--kv-cache virtual,orca", "--kv-cache 'orca' is unknown"),
        ("--kv-cache virtual,virtual", "--kv-cache names virtual twice"),
        ("--kv-cache virtual,orca-max --enable-prefix-caching", "orca-max cannot share"),
        ("--preemption-mode wait", "choose auto, swap or recompute"),
        ("--model opt-1b", "--model 'opt-1b' is neither a folder"),
        ("--model opt-13b --model opt-13b", "--model names opt-13b twice; write NAME=SHAPE"),
        ("--device tpu", "--device 'tpu' is unknown"),
        ("--load-gb-per-s 2", "--load-gb-per-s needs --weights tensor or whole"),
        ("--weights tensor --load-gb-per-s 0", "--load-gb-per-s is 0.0; .* above 0"),
        ("--weights layer", "--weights is 'layer'; choose resident, tensor or whole"),
        ("--weights tensor --kv-cache orca-max", "so no weights can come and go"),
        ("--memory 20GiB", "give more --memory"),
        ("--memory 24516MiB", "none of the 30 requests could be served in .*; give more --memory"),
        ("--max-model-len 50", "no request .* fits 50 tokens; try --cut"),
        ("--max-model-len 4096", "--max-model-len is 4096; opt-13b allows at most 2048"),
        ("--outputs-of gpt", "has no outputs by name; leave out --outputs-of"),
        ("--calibrate {folder}/latency.json", "measured on NVIDIA H200, .* --device is a100-40g"),
        ("--calibrate {folder}/latency.json --device h200", "those of opt-13b are"),
        ("--save-requests", "--save-requests adds to the file of --output; give one"),
        ("--output /proc/none/out.json", "--output: cannot write /proc/none/out.json: No such"),
        ("--output {folder}", "--output: cannot write .*: Is a directory"),
        ("--plot /proc/none/out.png", "--plot: cannot write /proc/none/out.png: No such file"),
        ("--plot {folder}/out.xyz", "--plot is .*out.xyz; its format must be one of .*, png"),
        ("--plot {folder}/out", "--plot is .*out; its format must be one of"),
    ],
)
def test_nonsense_is_an_error_before_the_run(trace, monkeypatch, arguments, message):
    _latency_result(trace.parent)
    if "give more --memory" not in message:  # only the pool of a run can tell that
        monkeypatch.setattr(bench, "run_replay", lambda *_: pytest.fail("the replay was run"))
    with pytest.raises(ConfigError, match=message):
        _replay(trace, *arguments.format(folder=trace.parent).split())
    assert {file.name for file in trace.parent.iterdir()} == {"trace.csv", "latency.json"}


def test_requests_that_the_memory_is_too_small_for_are_told(trace):
    """One of two managers could serve all requests; the other has to reserve 2048 tokens each."""
    output = _replay(trace, "--memory", "25GiB", "--kv-cache", "virtual,orca-max")
    assert "orca-max: 30 of 30 requests could not be served" in " ".join(output.split())
    assert "virtual: 30" not in output


def test_hash_ids_of_64_bits_are_distinct(tmp_path):
    """Ids that are equal in their lowest 22 bits, and beyond the signed range, share nothing."""
    ids = [[2**64 - 1, 7], [2**22 - 1, 7 + 2**22], [7, 2**64 - 1]]
    requests = [
        {"timestamp": 9000 * i, "input_length": 1024, "output_length": 2, "hash_ids": pair}
        for i, pair in enumerate([*ids, ids[0]])
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, requests)))
    _replay(tmp_path / "t.jsonl", "--enable-prefix-caching", "--output", tmp_path / "out.json")
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["prefix_cache_queries"] == 4096
    assert run["prefix_cache_hits"] == 1023  # of the last request: all but the last token


def test_plots_need_matplotlib(trace, tmp_path, monkeypatch):
    import_ = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    monkeypatch.setattr(bench, "run_replay", lambda *_: pytest.fail("the replay was run"))
    with pytest.raises(ConfigError, match=r"pip install 'aquifer\[plots\]'"):
        _replay(trace, "--plot", tmp_path / "out.png")


def test_results_are_written_before_plots(trace, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(replay_plot, "plot", fail)
    with pytest.raises(ConfigError, match="the disk is full"):
        _replay(trace, "--output", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert json.loads((tmp_path / "out.json").read_text())["runs"]


MANY = ("--model", "a=opt-1.3b", "--model", "b=opt-6.7b", "--weights", "tensor")


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    file = tmp_path / "two.csv"
    rows = [f"{5 * i},100,{40 if i else 1000},{'ab'[i % 2]}" for i in range(4)]
    file.write_text("\n".join(["arrival,prompt_tokens,output_tokens,model", *rows]))
    return file


def test_a_cluster(two_models, tmp_path):
    """The first worker is lost while it streams; the other one serves the rest."""
    output = _replay(
        two_models,
        *MANY,
        *("--workers", "1:l40,1:h200", "--placement", "round-robin", "--fail", "0@3"),
        *("--notice", "0.5", "--report-every", "1", "--output", tmp_path / "out.json"),
    )
    assert "workers 1:l40,1:h200" in output
    assert "1 requests failed: worker 0 failed while it streamed" in output
    assert "too large" not in output
    result = json.loads((tmp_path / "out.json").read_text())
    (run,) = result["runs"]
    assert (run["completed"], run["failed_with_a_worker"]) == (3, 1)
    assert (result["workers"], result["fail"]) == ("1:l40,1:h200", "0@3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--placement", "random"), "--placement needs --workers"),
        (("--workers", "2", "--weights", "resident"), "--workers needs --weights"),
        (("--workers", "0"), "write 8, or 6:l40,2:h200"),
        (("--workers", "2,1:l40"), "write 8, or 6:l40,2:h200"),
        (("--workers", "2:x"), "--workers 'x' is unknown"),
        (("--workers", "9999"), "at most 1024"),
        (("--workers", "2", "--fail", "1-2"), "write 0@120-180"),
        (("--workers", "2", "--fail", "2@1"), "the workers are 0 to 1"),
    ],
)
def test_clusters_that_cannot_be(two_models, arguments, message):
    with pytest.raises(ConfigError, match=message):
        _replay(two_models, *MANY, *arguments)
