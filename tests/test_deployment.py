"""The files for deployment name only what there is."""

from __future__ import annotations

import configparser
import fnmatch
import json
import re
from pathlib import Path

from aquifer.options import default_of, options_of

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = ROOT / "contrib" / "systemd" / "aquifer.service"
_LAST_BYTES_S = 5  # how long the server takes after its time-out; docs/guide/http.md says so


def _instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction of the Dockerfile."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines())]


def _arguments(name: str) -> str:
    """Arguments of the only instruction of that name."""
    (found,) = (rest for instruction, rest in _instructions() if instruction == name)
    return found


def _flags() -> set[str]:
    return {option.flag for option in options_of("serve")} | {"--config"}


def test_what_the_image_copies_is_there_and_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    included = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    sources = [
        source for name, rest in _instructions() if name == "COPY" for source in rest.split()[:-1]
    ]
    assert set(sources) == included
    for source in sources:
        assert (ROOT / source).exists(), source
        excluding = [line for line in lines if not line.startswith(("!", "#", "*"))]
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in excluding)


def test_the_image_has_what_the_package_is_built_from() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    copied = " ".join(rest for name, rest in _instructions() if name == "COPY").split()
    named = re.findall(r'^(?:readme|license-files) = .*?"([^"]+)"', project, re.MULTILINE)
    assert sorted(named) == ["LICENSE", "README.md"]
    assert {*named, "pyproject.toml", "constraints.txt", "src"} <= set(copied)


def test_the_image_runs_without_privileges() -> None:
    names = [name for name, _ in _instructions()]
    assert _arguments("USER") == "aquifer"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "COPY")
    assert "useradd --uid 10001 --create-home aquifer" in DOCKERFILE


def test_the_image_serves_the_port_that_it_checks() -> None:
    command = json.loads(_arguments("ENTRYPOINT")) + json.loads(_arguments("CMD"))
    assert command[:2] == ["aquifer", "serve"]
    assert {word for word in command if word.startswith("--")} <= _flags()
    port = command[command.index("--port") + 1]
    assert port == _arguments("EXPOSE")
    assert f"http://127.0.0.1:{port}/health" in _arguments("HEALTHCHECK")


def test_the_image_takes_the_tested_versions_of_the_extras_that_there_are() -> None:
    installs = re.findall(r"pip install (.*?);;", DOCKERFILE.replace("\\\n", " "))
    assert len(installs) == 2
    assert all("-c constraints.txt" in install for install in installs)
    (extra,) = re.findall(r"'\.\[(\w+)\]'", " ".join(installs))
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


def test_the_unit_waits_for_the_server_to_stop() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read(UNIT)
    service = unit["Service"]
    words = service["ExecStart"].split()
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= _flags()
    timeout_s = float(words[words.index("--shutdown-timeout") + 1])
    assert timeout_s >= default_of("shutdown_timeout")
    assert float(service["TimeoutStopSec"]) >= timeout_s + _LAST_BYTES_S + 5
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")
    assert service["RestartPreventExitStatus"] == "2"  # that of a ConfigError


def test_the_caches_of_the_unit_are_where_it_may_write() -> None:
    unit = UNIT.read_text()
    (folder,) = re.findall(r"^CacheDirectory=(.*)$", unit, re.MULTILINE)
    caches = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
    assert {"HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"} <= set(caches)
    assert all(Path(cache).is_relative_to(f"/var/cache/{folder}") for cache in caches.values())


def test_the_unit_hides_nothing_that_the_server_needs() -> None:
    settings = re.findall(r"^(\w+)=", UNIT.read_text(), re.MULTILINE)
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "ProcSubset", "PrivateNetwork"} & set(
        settings
    )
