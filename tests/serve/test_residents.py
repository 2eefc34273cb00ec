"""A server of models that do not fit into its memory together."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama
from tests.serve.alone import answers_of_one_engine
from tests.serve.running import ROOT, RunningServer, running

COMPLETIONS = "/v1/completions"
PROMPTS = [f"prompt {i}" for i in range(6)]
OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "256"]


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    others = [f"m{seed}={tiny_llama(folder / str(seed), seed=seed)}" for seed in (1, 2)]
    return [f"m0={checkpoint}", *others]


@pytest.fixture(scope="module")
def narrow_server(models: list[str], server: RunningServer) -> Iterator[RunningServer]:
    """A server with memory for one model and a half."""
    _, memory, _ = server.call("GET", "/memory")
    weight_bytes = memory["models"]["tiny"]["weights_total_bytes"]
    options = [*OPTIONS, "--memory", str(int(1.5 * weight_bytes))]
    with running(["-m", "aquifer", "serve", *models, *options]) as narrow:
        yield narrow
    assert narrow.process.returncode == 0
    assert narrow.problems == ""


def _statuses(server: RunningServer) -> dict[str, str]:
    _, memory, _ = server.call("GET", "/memory")
    return {name: model["status"] for name, model in memory["models"].items()}


def _answer(server: RunningServer, model: str, prompt: str) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 5, "temperature": 0}
    status, answer, _ = server.call("POST", COMPLETIONS, body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_what_does_not_fit_is_loaded_when_it_is_asked_for(narrow_server: RunningServer):
    assert _statuses(narrow_server) == {"m0": "resident", "m1": "registered", "m2": "registered"}
    _answer(narrow_server, "m1", "x")
    statuses = _statuses(narrow_server)
    assert statuses["m1"] == "resident"
    assert statuses["m0"] != "resident"


def test_memory_and_metrics_have_the_eviction_log(narrow_server: RunningServer):
    _answer(narrow_server, "m1", "x")
    _answer(narrow_server, "m0", "x")
    _, memory, _ = narrow_server.call("GET", "/memory")
    latest = memory["evictions"][0]
    assert latest["time"] >= memory["evictions"][-1]["time"] > 0
    assert latest["loser_kind"] in ("weights", "prefix")
    assert latest["evicted_bytes"] > 0
    guide = (ROOT / "docs" / "guide" / "sizing.md").read_text()
    table = guide.partition("| field of an eviction |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {name.removesuffix("_bytes") for name in latest}
    (totals,) = (
        each
        for each in memory["eviction_totals"]
        if (each["loser_model"], each["loser_kind"]) == ("m1", "weights")
    )
    assert totals.keys() - {"evictions"} < latest.keys()
    _, metrics, _ = narrow_server.call("GET", "/metrics")
    labels = '{kind="weights",model="m1"}'
    values = {
        name: float(line.rpartition(" ")[2])
        for name in ("evictions", "evicted_bytes", "eviction_regret_expected_seconds")
        for line in metrics.splitlines()
        if line.startswith(f"aquifer:{name}_total{labels}")
    }
    assert len(values) == 3
    assert all(value > 0 for value in values.values()), values
    of_m1 = [
        entry
        for entry in memory["evictions"]
        if (entry["loser_model"], entry["loser_kind"]) == ("m1", "weights")
    ]
    assert values["evictions"] == totals["evictions"] == len(of_m1)
    num_bytes = sum(entry["evicted_bytes"] for entry in of_m1)
    assert values["evicted_bytes"] == totals["evicted_bytes"] == num_bytes
    assert "aquifer:eviction_regret_paid_seconds_total" + labels in metrics


def test_ps_lists_them(narrow_server: RunningServer):
    _answer(narrow_server, "m2", "x")
    command = [sys.executable, "-m", "aquifer", "ps", "--url", narrow_server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert lines.keys() >= {"MODEL", "m0", "m1", "m2", "cpu:"}
    statuses = _statuses(narrow_server)
    assert all(f" {statuses[name]} " in lines[name] for name in statuses)
    wrong = subprocess.run(
        [*command, "--url", "http://127.0.0.1:9"], capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: no server of Aquifer answers at http://127.0.0.1:9")


def test_answers_are_those_of_engines_with_room_for_all(
    narrow_server: RunningServer, models: list[str]
):
    """Requests of three models at once, from as many clients."""
    asked = [(f"m{i % 3}", prompt) for i, prompt in enumerate(PROMPTS * 2)]
    expected = answers_of_one_engine(models, asked, max_tokens=5)
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda one: _answer(narrow_server, *one), asked))
    assert found == expected
    _, memory, _ = narrow_server.call("GET", "/memory")
    assert memory["requests_running"] == memory["requests_waiting"] == 0
