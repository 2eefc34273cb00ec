"""The commands of examples/README.md, run as they are written there.

They run with the clients' own environment, which `make` puts beside the one of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from tests.cases import EVERY_CASE
from tests.serve.running import PATIENCE_S, ROOT, RunningServer, running

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
BIN = Path(f"{sys.prefix}-examples") / "bin"
BOAT = "Tell me a story about a small boat."

_COMMAND = re.compile(r"^(?:\w+=\w+ )?(?:python|lm_eval) .*examples/.*$", re.MULTILINE)
_ADDRESS = "http://127.0.0.1:8000"
_LM_EVAL_ALONE = """
import sys
from functools import partialmethod
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
sys.exit(cli_evaluate())
"""
"""lm-eval without the 14,000 files of its own tasks, which take 20 s to read whatever it runs."""


@pytest.fixture(scope="module")
def demo_server() -> Iterator[RunningServer]:
    command = re.findall(r"^aquifer (serve .*)$", README, re.MULTILINE)
    assert len(command) == 1
    with running(["-m", "aquifer", *command[0].split(), "--port", "0"]) as server:
        yield server


def _run(name: str, server: RunningServer, folder: Path, *more: str) -> str:
    """The output of the command that has this name in it."""
    (command,) = (found for found in _COMMAND.findall(README) if f"examples/{name}" in found)
    words = shlex.split(command.replace(_ADDRESS, server.url))
    variables = {}
    while "=" in words[0]:
        variable, _, value = words.pop(0).partition("=")
        variables[variable] = value
    assert (BIN / words[0]).exists(), f"{BIN} is not there: make examples"
    program = [str(BIN / words[0])]
    if words[0] == "lm_eval" and not EVERY_CASE:
        program = [str(BIN / "python"), "-c", _LM_EVAL_ALONE]
    environment = {
        **os.environ,
        **variables,
        "HF_HOME": str(folder),  # lm-eval reads its files through a cache
        "HF_HUB_OFFLINE": "1",
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "PYTHONPATH": "",
    }
    environment.pop("OPENAI_API_KEY", None)
    # They import thousands of modules, which are not compiled when they are installed.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run(
        [*program, *words[1:], *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _chat(server: RunningServer, question: str) -> dict[str, Any]:
    """The server's answer of 40 tokens."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 40,
        "temperature": 0,
    }
    status, answer, _ = server.call("POST", "/v1/chat/completions", body)
    assert status == 200
    found: dict[str, Any] = answer
    return found


def _text(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    assert len(text) > 40
    return text


def _usage(answer: dict[str, Any]) -> str:
    return f"usage: {answer['usage']['prompt_tokens']} in, 40 out"


def test_openai(demo_server: RunningServer, tmp_path: Path) -> None:
    lines = _run("openai_client", demo_server, tmp_path).splitlines()
    answer = _chat(demo_server, BOAT)
    assert lines[:3] == ["models: demo", f"chat: {_text(answer)}", _usage(answer)]
    assert lines[3] == "completion: ' time, there was', finish reason: length"
    logged = [line.split(":") for line in lines[4:8]]
    assert [token.strip() for token, _ in logged] == ["' time'", "','", "' there'", "' was'"]
    assert all(-1 < float(value) <= 0 for _, value in logged)
    assert lines[8].startswith("refused: ")
    assert "'param': 'temperature'" in lines[8]
    assert len(lines) == 9


def test_litellm(demo_server: RunningServer, tmp_path: Path) -> None:
    lines = _run("litellm_client", demo_server, tmp_path).splitlines()
    expected = [f"chat: {_text(_chat(demo_server, BOAT))}"]
    for animal in ("fox", "cat"):
        answer = _chat(demo_server, f"Tell me a story about a {animal}.")
        expected += [f"{animal}: {_text(answer)}", _usage(answer)]
    assert lines == expected


def test_langchain(demo_server: RunningServer, tmp_path: Path) -> None:
    lines = _run("langchain_client", demo_server, tmp_path).splitlines()
    boat = _chat(demo_server, BOAT)
    stories = [
        f"{topic}: {_text(_chat(demo_server, f'Tell me a story about {topic}.'))}"
        for topic in ("a fox", "a cat")
    ]
    assert lines == [f"chat: {_text(boat)}", *stories, _usage(boat)]


def test_lm_eval(demo_server: RunningServer, tmp_path: Path) -> None:
    output = _run("lm_eval", demo_server, tmp_path, "--output_path", str(tmp_path / "result.json"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
    values = {row[0]: (row[4], row[6]) for row in rows if row and row[0] in ("endings", "words")}
    assert values == {"endings": ("acc", "1"), "words": ("exact_match", "1")}


def test_every_example_has_a_command() -> None:
    scripts = {file.stem for file in EXAMPLES.glob("*.py")} | {"lm_eval"}
    commands = _COMMAND.findall(README)
    assert len(commands) == len(scripts)
    for name in scripts:
        assert any(f"examples/{name}" in command for command in commands), name


def test_what_is_installed_is_what_is_required() -> None:
    def lines(name: str) -> list[str]:
        texts = (line.partition("#")[0].strip() for line in (EXAMPLES / name).open())
        return [text for text in texts if text]

    pins = dict(line.lower().replace("_", "-").split("==") for line in lines("constraints.txt"))
    for requirement in map(Requirement, lines("requirements.txt")):
        assert requirement.specifier.contains(pins[requirement.name]), requirement
