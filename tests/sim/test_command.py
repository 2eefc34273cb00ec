"""`aquifer replay`, as its users call it."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aquifer.bench import replay as bench
from aquifer.cli import app
from aquifer.errors import ConfigError
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import find_device, find_model
from aquifer.sim.trace import TraceRequest


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


def test_find_rate(trace, tmp_path):
    arguments = ("--kv-cache", "virtual,orca-max", "--num-requests", "40", "--memory", "30GiB")
    options = ("--page-size", "32MiB", "--latency-bound", "0.05", "--output", tmp_path / "o.json")
    _replay(trace, "--find-rate", *arguments, *options)
    result = json.loads((tmp_path / "o.json").read_text())
    sustained = result["sustained_rate"]
    assert sustained["virtual"] > sustained["orca-max"]
    for run in result["runs"]:
        is_within = run["normalized_latency"] <= 0.05
        assert is_within == (run["request_rate"] <= sustained[run["kv_cache"]])
    # The next rate that was tried is hardly higher.
    for name, most in sustained.items():
        rates = [run["request_rate"] for run in result["runs"] if run["kv_cache"] == name]
        assert min(rate for rate in rates if rate > most) <= 1.021 * most


def test_a_bound_that_cannot_be_kept():
    config = ReplayConfig({"m": find_model("opt-13b")}, find_device("a100-40g"))
    workload = bench.Workload([TraceRequest(None, 10, 2)], 3, 0)
    with pytest.raises(ConfigError, match="does not reach 1e-06 s/token at any rate"):
        bench.find_rate(config, workload, 1e-6, lambda what, num_ended, total: None)


def test_lengths_of_several_authors(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"instructions": ["a b c"], "output_tokens": {"x": [8]}}))
    assert "4" in _replay(file, "--rate", "3", "--outputs-of", "x", "--num-requests", "5")
    with pytest.raises(ConfigError, match="give a --rate"):
        _replay(file, "--outputs-of", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "1", "--find-rate"), "give one of --rate, --rates and --find-rate"),
        (("--rate", "0"), "--rate is 0.0; it must be a number above 0, such as 2.0"),
        (("--beam-width", "4", "--num-samples", "2"), "give one of --num-samples and --beam-width"),
        (("--rate", "nan"), "--rate is nan"),
        (("--rates", "1,x"), "--rates is '1,x'; write 1,2,4"),
        (("--rates", "1,nan"), "--rates is '1,nan'"),
        (("--seed", "-1"), "--seed is -1; it must be a whole number of at least 0, such as 0"),
        (("--page-size", "0"), "--page-size is 0; it must be a size of at least 1, such as 2MiB"),
        (("--kv-cache", "virtual,orca"), "--kv-cache 'orca' is unknown"),
        (("--preemption-mode", "wait"), "choose auto, swap or recompute"),
        (("--model", "opt-1b"), "--model 'opt-1b' is neither a folder"),
        (("--device", "tpu"), "--device 'tpu' is unknown"),
        (("--memory", "20GiB"), "give more --memory"),
        (("--max-model-len", "50"), "no request .* fits 50 tokens; try --cut"),
    ],
)
def test_wrong_options(trace, arguments, message):
    with pytest.raises(ConfigError, match=message):
        _replay(trace, *arguments)


def test_plots_need_matplotlib(trace, tmp_path, monkeypatch):
    import_ = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ConfigError, match=r"pip install 'aquifer\[plots\]'"):
        _replay(trace, "--plot", tmp_path / "out.png")
