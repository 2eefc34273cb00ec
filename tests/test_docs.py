"""The documents name only what there is."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tools.options_table import with_table

from aquifer.serve.protocol import requests

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
DOCUMENTS = [
    *sorted((ROOT / "docs").glob("**/*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
]

_CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_DOTTED = re.compile(r"aquifer(\.\w+)+")
_CLASS = re.compile(r"[A-Z][a-z]\w*[A-Z]\w*|[A-Z]{2,}[a-z]\w*")
_PATH = re.compile(r"(?:src|docs|tests|tools|benchmarks|examples|contrib)/[\w./-]*")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@cache
def _sources() -> str:
    return "\n".join(file.read_text() for file in sorted((ROOT / "src").glob("**/*.py")))


def _resolve(dotted: str) -> Any:
    """The module, class, function, method or field of that name."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(error.name or "-"):
                raise
            continue
        for part in parts[end:]:
            if inspect.isclass(found) and part in inspect.get_annotations(found):
                return found.__annotations__[part]
            found = getattr(found, part)
        return found
    raise AttributeError(dotted)


def _problems(text: str, folder: Path) -> list[str]:
    problems = []
    for code in _CODE.findall(_FENCE.sub("", text)):
        name = code.removesuffix("()")
        if _DOTTED.fullmatch(name):
            try:
                _resolve(name)
            except (AttributeError, ImportError):
                problems.append(f"there is no {name}")
        elif _CLASS.fullmatch(name) and not re.search(rf"\b{name}\b", _sources()):
            problems.append(f"nothing in src/ is called {name}")
        elif _PATH.fullmatch(name) and not (ROOT / name).exists():
            problems.append(f"there is no file {name}")
    for link in _LINK.findall(text):
        target = link.partition("#")[0]
        is_outside = "://" in target or target.startswith("mailto:")
        if not is_outside and not (folder / target).exists():
            problems.append(f"the link to {link} leads nowhere")
    return problems


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_names_paths_and_links(document):
    assert not _problems(document.read_text(encoding="utf-8"), document.parent)


def test_what_is_not_there_is_found():
    text = """
    `aquifer.memory.pool.PagePool.acquire` `aquifer.memory.pool.PoolUsage.idle_bytes` `PagePool`
    `aquifer.memory.pool.PagePool.aquire` `aquifer.memroy` `PagePoool` `docs/nothing.md`
    `src/aquifer/cli.py` [here](README.md#top) [gone](gone.md) [out](https://example.org/x)
    """
    assert _problems(text, ROOT) == [
        "there is no aquifer.memory.pool.PagePool.aquire",
        "there is no aquifer.memroy",
        "nothing in src/ is called PagePoool",
        "there is no file docs/nothing.md",
        "the link to gone.md leads nowhere",
    ]


def test_the_tree_names_every_module_and_package():
    document = (ROOT / "docs" / "architecture.md").read_text()
    tree = document.split("## The tree")[1].split("```")[1]
    root = ROOT / "src" / "aquifer"
    modules = {file for file in root.glob("**/*.py") if not file.name.startswith("__")}
    packages = {file.parent for file in root.glob("*/**/__init__.py")}
    names = {file.name for file in modules} | {f"{folder.name}/" for folder in packages}
    assert set(re.findall(r"\w+\.py|\w+/", tree)) - {"src/", "aquifer/"} == names


def test_readme_has_the_table_of_options():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_table(readme), "run python tools/options_table.py"


def test_the_numbers_of_invariants_that_are_cited_exist():
    """Those of docs/memory.md: cited in the tests, and in the check of the ledger."""
    document = (ROOT / "docs" / "memory.md").read_text()
    defined = set(re.findall(r"^- \*\*([MK]\d+)\*\*", document, re.MULTILINE))
    cited = set(re.findall(r"\bM\d\b", (ROOT / "src/aquifer/memory/ledger.py").read_text()))
    for folder in ("memory", "cache"):
        for file in (ROOT / "tests" / folder).glob("*.py"):
            cited |= set(re.findall(r"\b[MK]\d\b", file.read_text()))
    assert cited == defined


def test_the_guide_names_every_field_of_the_api() -> None:
    """What is honoured, accepted without effect, or refused; and nothing that there is not."""
    guide = (ROOT / "docs" / "guide" / "http.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", guide.partition("## Limits")[0]))
    bodies = (
        requests.CompletionRequest,
        requests.ChatCompletionRequest,
        requests.TokenizeRequest,
        requests.DetokenizeRequest,
        requests.PrefixRequest,
        requests.StreamOptions,
    )
    fields = {name for body in bodies for name in body.model_fields}
    fields |= requests.UNSUPPORTED_FIELDS.keys()
    assert named == fields
