"""Models of the Hugging Face hub, with a hub in a folder: no test needs a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from tests.checkpoints import tiny_llama

from aquifer import LLM, ConfigError, SamplingParams
from aquifer.cli import app
from aquifer.config import ModelSpec
from aquifer.hub import locate
from aquifer.serve import server

ROOT = Path(__file__).parents[1]
ORG_TINY = ModelSpec.parse("org/tiny")
GREEDY = SamplingParams(temperature=0, max_tokens=4)
OTHERS = ["consolidated.safetensors", "pytorch_model.bin", "README.md", "original/config.json"]


class Hub:
    """A hub with one model, `org/tiny`; its downloads are copies."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = tiny_llama(folder / "tiny")
        self.downloads: list[tuple[str, str | None]] = []
        self.error: Exception | None = None
        self._cache = folder / "cache"

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        if self.error is not None:
            raise self.error
        assert repo_id == "org/tiny"
        self.downloads.append((repo_id, revision))
        snapshot = self._cache / str(len(self.downloads))
        snapshot.mkdir(parents=True)
        names = [file.name for file in self.checkpoint.iterdir()] + OTHERS
        for name in names:
            if _matches(name, allow_patterns) and not _matches(name, ignore_patterns):
                shutil.copy(self.checkpoint / name, snapshot / name)
        return str(snapshot)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return hub


def test_what_is_read_is_downloaded(hub: Hub):
    (found,) = locate([ORG_TINY], "v1")
    assert hub.downloads == [("org/tiny", "v1")]
    assert (found.name, found.aliases) == ("org/tiny", ("tiny",))
    names = {file.name for file in hub.checkpoint.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert {file.name for file in found.path.iterdir()} == names


def test_weights_are_left_out_where_they_are_not_needed(hub: Hub):
    (found,) = locate([ORG_TINY], weights=False)
    names = {file.name for file in found.path.iterdir()}
    assert "config.json" in names
    assert not any(name.endswith(".safetensors") for name in names)


def test_a_folder_of_that_name_is_taken(hub: Hub, tmp_path: Path):
    shutil.copytree(hub.checkpoint, tmp_path / "org" / "tiny")
    assert locate([ORG_TINY]) == (ORG_TINY,)
    assert not hub.downloads


@pytest.mark.parametrize(
    ("text", "hub_id"),
    [
        ("org/tiny", "org/tiny"),
        ("org/tiny/", "org/tiny"),
        ("name=meta-llama/Llama-3.2_1B", "meta-llama/Llama-3.2_1B"),
        ("tiny", None),
        ("./org/tiny", None),
        ("../tiny", None),
        ("~/tiny", None),
        ("/org/tiny", None),
        ("a/b/c", None),
    ],
)
def test_texts_that_may_be_on_the_hub(text: str, hub_id: str | None):
    assert ModelSpec.parse(text).hub_id == hub_id


def test_all_paths_are_checked_before_the_first_download(hub: Hub):
    with pytest.raises(ConfigError, match=r"no such model: \S*missing does not exist; give"):
        locate([ORG_TINY, ModelSpec.parse("./missing")])
    assert not hub.downloads


@pytest.mark.parametrize(("texts", "num"), [(["/"], 0), (["org/tiny", "org/other"], 2)])
def test_a_revision_of_no_model_or_of_any_is_refused(hub: Hub, texts: list[str], num: int):
    with pytest.raises(ConfigError, match=f"--revision is for one model .*, and {num} of the"):
        locate([ModelSpec.parse(text) for text in texts], "v1")
    assert not hub.downloads


def test_llm_downloads(hub: Hub):
    with LLM(hub.checkpoint, memory="16M") as llm:
        expected = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM("org/tiny", revision="v1", memory="16M") as llm:
        assert list(llm.engine.models) == ["org/tiny"]
        assert llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert hub.downloads == [("org/tiny", "v1")]


def test_commands_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    got: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda *configs, **_: got.extend(configs))
    monkeypatch.setenv("AQUIFER_REVISION", "v1")
    app(["serve", "org/tiny", "other=/"], standalone_mode=False)
    tiny, other = got[0].models
    assert (tiny.name, other.path) == ("org/tiny", Path("/"))
    assert (tiny.path / "model.safetensors").is_file()
    app(["run", "org/tiny", "x", "--revision", "v2", "--max-tokens", "2"], standalone_mode=False)
    options = ["--repeats", "1", "--device", "cpu", "--revision", "v3"]
    app(["bench", "load", "org/tiny", *options], standalone_mode=False)
    assert hub.downloads == [("org/tiny", revision) for revision in ("v1", "v2", "v3")]
    assert "page-locked" not in capsys.readouterr().err


def _refused(kind: Callable[..., Exception]) -> Exception:
    """An answer of the hub that is an error."""
    return kind("401\n\nMany lines.", response=SimpleNamespace(headers={}, request=None))


def _unreachable(cause: Exception) -> Exception:
    error = errors.LocalEntryNotFoundError("no snapshot\nplease check")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            _refused(errors.GatedRepoError),
            "access to it is restricted; accept its terms on https://huggingface.co/org/tiny, "
            "then run 'hf auth login'",
        ),
        (_refused(errors.RepositoryNotFoundError), "it does not exist, or is private; check the"),
        (_refused(errors.RevisionNotFoundError), "it has no revision 'v1'; give one of its"),
        (
            _unreachable(ConnectionError("no route\nat all")),
            "the hub cannot be reached (no route), and its files are not all in the cache; check",
        ),
        (OSError(28, "No space left on device"), "No space left on device; try again, or give"),
        (TimeoutError(), "TimeoutError; try again"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, error: Exception, words: str):
    hub.error = error
    with pytest.raises(ConfigError) as caught:
        locate([ORG_TINY], "v1")
    message = str(caught.value)
    assert message.startswith("there is no folder org/tiny, and the Hugging Face hub's model")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("command", ["serve", "run"])
def test_offline(command: str, tmp_path: Path):
    """With the hub's own library: nothing is in its cache."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT / "src")
    result = subprocess.run(
        [sys.executable, "-m", "aquifer", command, "org/tiny"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: there is no folder org/tiny, and the Hugging Face hub")
    assert "HF_HUB_OFFLINE is set" in result.stderr
    assert "unset HF_HUB_OFFLINE, or give the path of a folder\n" in result.stderr
    assert result.stderr.count("\n") == 1
