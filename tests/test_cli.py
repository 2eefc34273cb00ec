"""The command line, as its users see it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.checkpoints import tiny_llama

from aquifer import ConfigError, __version__
from aquifer.__main__ import main
from aquifer.cli import app
from aquifer.memory.driver import cuda

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
    "COLUMNS": "200",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny")


def _aquifer(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aquifer", *map(str, arguments)],
        input=stdin,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def _aquifer_here(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported torch; not for a command that serves."""
    command = ["aquifer", *map(str, arguments)]
    output, errors = StringIO(), StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "stdin", StringIO(stdin)),
        mock.patch.dict(os.environ, ENVIRONMENT),
        redirect_stdout(output),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def test_version():
    result = _aquifer("--version")
    assert (result.returncode, result.stdout) == (0, f"aquifer {__version__}\n")


def test_no_command_shows_help():
    assert "serve" in _aquifer("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "no/such/folder", "--port", "0"], "no/such/folder does not exist"),
        (
            ["serve", "x", "--memory", "lots"],
            "--memory is 'lots'; it must be a size of at least 1, such as 4GiB",
        ),
        (
            ["serve", "x", "--max-num-seqs", "0"],
            "--max-num-seqs is 0; it must be a whole number of at least 1, such as",
        ),
        (
            ["serve", "x", "--dtype", "int4"],
            "--dtype is 'int4'; choose auto, float32, bfloat16 or float16",
        ),
        (["serve", "x", "--device", "tpu"], "--device is 'tpu'; choose auto, cpu, cuda or cuda:N"),
        (
            ["serve", "x", "--gpu-memory-utilization", "1.5"],
            "--gpu-memory-utilization is 1.5; it must be",
        ),
        (["serve", "x", "--load-format", "fast"], "--load-format is 'fast'"),
        (
            ["serve", "x", "--chat-template", "missing.jinja"],
            "--chat-template: cannot read missing.jinja",
        ),
        (["serve", "x", "--config", "missing.yaml"], "--config: cannot read missing.yaml"),
        (["serve"], "no model given; write aquifer serve PATH"),
        (["serve", "x", "x"], "same name"),
        (
            ["serve", "x", "--port", "70000"],
            "--port is 70000; it must be a whole number from 0 to 65535",
        ),
        (["serve", "demo", "--log-level", "loud"], "choose debug, info, warning or error"),
        (["serve", "demo", "--allowed-origins", "example.org"], "such as https://chat.example.org"),
        (["run", "no/such/folder", "hello"], "no/such/folder does not exist"),
        (["compile"], "no model given; write aquifer compile PATH"),
        (["compile", "demo", "--device", "cpu"], "kernels are compiled for a GPU"),
        (["compile", "demo", "-tp", "2"], "tensor_parallel_size is 2; kernels are compiled ahead"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str):
    _check_error(_aquifer_here(*arguments), words)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("256.0.0.1", "256.0.0.1"),
        (64 * "a", "is not an address of this machine"),
        ("192.0.2.77", "'192.0.2.77' is not an address"),
    ],
)
def test_an_address_of_another_machine_is_an_error(host: str, words: str):
    _check_error(_aquifer("serve", "demo", "--host", host, "--port", "0"), words)


def _check_error(result: subprocess.CompletedProcess[str], words: str) -> None:
    """A command has ended with an error of one line, which has some words."""
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "run", "compile", "bench throughput", "bench start"])
def test_a_path_that_does_not_exist_is_refused_before_torch_is_imported(command: str):
    arguments = [sys.executable, "-X", "importtime", "-m", "aquifer", *command.split()]
    arguments.append("no/such/folder")
    result = subprocess.run(
        arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 2
    assert "no/such/folder does not exist" in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "aquifer.config" in imported
    assert not imported & {"torch", "transformers", "fastapi", "uvicorn", "huggingface_hub"}


def test_options_that_do_not_exist_say_so():
    result = _aquifer("serve", "x", "--pipeline-parallel-size", "2")
    assert result.returncode == 2
    assert "No such option" in result.stderr


def test_memory_too_small_is_an_error(checkpoint: Path):
    result = _aquifer("serve", checkpoint, "--port", "0", "--memory", "128K")
    assert result.returncode == 2
    assert result.stderr.startswith("error: the weights take")
    assert result.stderr.count("\n") == 1


def _version_to(stdout: int) -> subprocess.CompletedProcess[str]:
    """Have the version written to an open file."""
    return subprocess.run(
        [sys.executable, "-m", "aquifer", "--version"],
        check=False,
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error(monkeypatch, unbuffered: str):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("w") as full:
        result = _version_to(full.fileno())
    assert result.returncode == 1
    assert result.stderr == "error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_gone_is_no_error_to_tell(monkeypatch, unbuffered: str):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = _version_to(writer)
    finally:
        os.close(writer)
    assert result.stderr == ""


def test_run_answers_a_prompt_or_standard_input(checkpoint: Path):
    options = ("--max-tokens", "8", "--temperature", "0", "--memory", "16M")
    chat = _aquifer("run", checkpoint, "hello", *options)
    assert chat.returncode == 0, chat.stderr
    assert chat.stderr == ""
    assert len(chat.stdout) > 1
    assert _aquifer_here("run", checkpoint, *options, stdin="hello").stdout == chat.stdout
    assert _aquifer_here("run", checkpoint, "hello", "--raw", *options).stdout != chat.stdout


def test_an_answer_takes_no_more_than_the_context_has_left(checkpoint: Path):
    result = _aquifer_here("run", checkpoint, "--raw", "ab" * 20, "--max-model-len", "64")
    assert (result.returncode, result.stderr) == (0, "")


def test_run_refuses_what_cannot_be_answered(checkpoint: Path):
    result = _aquifer_here("run", checkpoint, "x" * 3000)
    assert result.returncode == 1
    assert result.stderr.startswith("error: the prompt has")


def test_run_converses_in_a_terminal(checkpoint: Path):
    ours, theirs = pty.openpty()
    options = ["--max-tokens", "4", "--temperature", "0"]
    command = [sys.executable, "-m", "aquifer", "run", str(checkpoint), *options]
    environment = {**ENVIRONMENT, "TERM": "vt100"}
    shown = []
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        up = b"\x1b[A"
        for line in (b"hello", b"", b"/help", b"/nothing", up + up + up, b"/clear", b"/bye"):
            output = b""
            while b">>> " not in output:
                assert select.select([ours], [], [], PATIENCE_S)[0], output
                output += os.read(ours, 1024)
            shown.append(output.decode(errors="replace"))
            os.write(ours, line + b"\n")
        assert process.wait(PATIENCE_S) == 0
    os.close(ours)
    _, hello, empty, helped, unknown, recalled, cleared = shown
    assert re.search(r"\[4 tokens, the first after \S+ s, then \S+ tokens/s\]", hello)
    assert "tokens" not in empty
    assert "forget the conversation" in helped
    assert "tokens" not in helped + unknown + cleared
    assert "no command /nothing; /help lists them" in unknown
    assert "hello" in recalled  # the first line, three lines up
    assert "[4 tokens," in recalled


def test_info():
    result = _aquifer("info")
    assert result.returncode == 0, result.stderr
    for words in ("create one page", "map one page", "unmap", "release", "torch", "demo"):
        assert words in result.stdout


def test_info_on_a_machine_with_a_gpu_but_without_the_bindings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing() -> None:
        raise ConfigError("device 'cuda' needs the CUDA bindings; pip install 'aquifer[cuda]'")

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "load_api", missing)
    app(["info"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "cuda:0 cannot be used: device 'cuda' needs the CUDA bindings; pip install" in shown
    assert "cpu (host driver)" in shown


def test_demonstration(checkpoint: Path):
    command = [sys.executable, str(ROOT / "tools" / "demo.py")]
    options: dict[str, Any] = {"env": ENVIRONMENT, "capture_output": True, "timeout": PATIENCE_S}
    shown = subprocess.run([*command, str(checkpoint)], check=False, text=True, **options)
    assert shown.returncode == 0, shown.stderr
    for words in ("Once upon a time", "assistant: ", "/ weights", "free"):
        assert words in shown.stdout
    failed = subprocess.run([*command, "no/such/model"], check=False, text=True, **options)
    assert failed.returncode == 1
    assert "no/such/model does not exist" in failed.stderr
