"""Commands, fields and metrics of the guides, compared with a server of the bundled model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.running import PATIENCE_S, ROOT, RunningServer, eventually, running

GUIDES = {file.name: file.read_text() for file in sorted((ROOT / "docs/guide").glob("*.md"))}
_CONSOLE = re.compile(r"^```console\n\$ aquifer (.*)\n(.*)\n```$", re.MULTILINE)
_CURL = re.compile(r"^curl http://127\.0\.0\.1:8000(\S+)", re.MULTILINE)
_KEYS = "key-of-alice,key-of-bob"


@pytest.fixture(scope="module")
def demo_server() -> Iterator[RunningServer]:
    assert f"AQUIFER_API_KEY={_KEYS} aquifer serve demo --host 0.0.0.0" in GUIDES["deployment.md"]
    command = ["-m", "aquifer", "serve", "demo", "--memory", "64M", "--port", "0"]
    with running([*command, "--api-key", _KEYS]) as server:
        yield server


def _get(server: RunningServer, path: str) -> object:
    headers = {"Authorization": "Bearer key-of-alice"}
    status, answer, _ = server.call("GET", path, headers=headers)
    assert status == 200, path
    return answer


@pytest.mark.parametrize(
    ("command", "output"), [match for text in GUIDES.values() for match in _CONSOLE.findall(text)]
)
def test_what_a_command_prints(command: str, output: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "aquifer", *command.split()],
        cwd=tmp_path,
        env={
            **{name: os.environ[name] for name in os.environ if name != "AQUIFER_GUARD_PAGES"},
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "AQUIFER_PORT": "0",  # another program may listen on the default one
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.stderr.splitlines()[-1] == output


def test_there_are_such_commands() -> None:
    assert len(_CONSOLE.findall(GUIDES["sizing.md"])) == 2


def test_fields_of_memory(demo_server: RunningServer) -> None:
    answer = _get(demo_server, "/memory")
    assert isinstance(answer, dict)
    model = answer["models"]["demo"]
    table = GUIDES["sizing.md"].partition("| field | meaning |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    given = {name.removesuffix("_bytes") for name in (*answer, *model)}
    assert named == given
    parts = sum(model[f"{kind}_bytes"] for kind in ("weights", "kv", "state", "prefix"))
    assert parts + answer["overhead_bytes"] + answer["free_bytes"] == answer["budget_bytes"]
    assert answer["used_bytes"] + answer["free_bytes"] == answer["budget_bytes"]


def test_lines_at_the_start(demo_server: RunningServer) -> None:
    section = GUIDES["sizing.md"].partition("`aquifer serve demo --memory 64M`:")[2]
    lines = section.split("```")[1].strip().splitlines()
    assert len(lines) == 5
    eventually(lambda: f": {lines[-1]}\n" in demo_server.stderr, "the last line is logged")
    for line in lines:
        assert f": {line}\n" in demo_server.stderr


def test_metrics_exist(demo_server: RunningServer) -> None:
    text = str(_get(demo_server, "/metrics"))
    given = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    for name, guide in GUIDES.items():
        assert set(re.findall(r"`(aquifer:\w+)`", guide)) <= given, name


def test_paths_exist(demo_server: RunningServer) -> None:
    schema = _get(demo_server, "/openapi.json")
    assert isinstance(schema, dict)
    for name, guide in GUIDES.items():
        if name == "http.md":  # some of its paths need an option
            continue
        for path in _CURL.findall(guide):
            _get(demo_server, path)
        named = set(re.findall(r"`(?:GET |POST |DELETE )?(/(?:v1/)?[a-z_./]+)`", guide))
        own = {path for path in named if path.count("/") <= 1 or path.startswith("/v1/")}
        missing = own - schema["paths"].keys() - {"/docs", "/openapi.json"}
        assert not missing, name


def test_open_paths_need_no_key(demo_server: RunningServer) -> None:
    section = GUIDES["deployment.md"].partition("## API keys")[2].partition("\n## ")[0]
    (sentence,) = re.findall(r"[^.]*stay open", section)
    open_paths = re.findall(r"`(/\w+)`", sentence)
    assert open_paths == ["/health", "/metrics", "/version"]
    statuses = [demo_server.call("GET", path)[0] for path in (*open_paths, "/memory")]
    assert statuses == [200, 200, 200, 401]
