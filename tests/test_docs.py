"""The documents name only what there is."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import re
import shlex
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import support_table
from tools.options_table import with_table
from tools.sizing_tables import with_tables
from typer.core import TyperGroup

from aquifer import LLM, CapacityError, SamplingParams
from aquifer.cli import app
from aquifer.options import OPTIONS
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
_FLAG = re.compile(r"--[a-z][a-z-]*")
_COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*aquifer ((?:.*\\\n)*.*)$", re.MULTILINE)
_MESSAGE = re.compile(r"\*\*`([^`]+)`\*\*")
_HOLE = "\0"  # in place of a value, in a message of the sources


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


def test_readme_has_the_table_of_models():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == support_table.with_table(readme), "run python -m tools.support_table"


def test_readme_has_the_table_of_options():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_table(readme), "run python -m tools.options_table"


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


@cache
def _flags() -> dict[str, set[str]]:
    """The flags of all commands by what is typed, such as "bench latency"."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        if isinstance(command, TyperGroup):
            ctx = typer.Context(command)
            for sub in command.list_commands(ctx):
                yield from walk(command.get_command(ctx, sub), f"{name} {sub}".strip())
        yield (
            name,
            {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)},
        )

    return dict(walk(typer.main.get_command(app), ""))


def _wrong_flags(text: str) -> list[str]:
    """Flags of commands in the text, and alone in backticks, that the program does not have."""
    every = {"--help"}.union(*_flags().values())
    wrong = []
    for typed in _COMMAND.findall(text):
        words = shlex.split(typed.replace("\\\n", " "), comments=True)
        name = " ".join(words[:2]) if words[0] in ("bench", "cluster", "predict") else words[0]
        known = _flags().get(name, set())
        wrong += [f"{name} {word}" for word in words if _FLAG.match(word) and word not in known]
    for code in _CODE.findall(_FENCE.sub("", text)):
        if code.startswith("--") and code.split()[0] not in every:
            wrong.append(code)
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_flags_and_variables_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert not _wrong_flags(text.replace("--no-...", "--no-enable-prefix-caching"))
    variables = {option.variable for option in OPTIONS}
    assert set(re.findall(r"\bAQUIFER_[A-Z_]+", text)) <= variables


def test_flags_that_are_not_there_are_found() -> None:
    text = """
`--memory 4G` `--memroy` `docker run --gpus all`
```
X=1 aquifer serve demo --port 1 --prot 2   # --comment
aquifer bench latency demo \\
    --batch-size 1 --port 1
aquifer sevre --port 1
```
"""
    assert _wrong_flags(text) == [
        "serve --prot",
        "bench latency --port",
        "sevre --port",
        "--memroy",
    ]


def test_every_guide_is_in_the_index() -> None:
    index = (ROOT / "docs/guide/README.md").read_text()
    assert {link for link in _LINK.findall(index) if "/" not in link} == {
        guide.name for guide in GUIDES if guide.name != "README.md"
    }
    assert "(docs/guide/README.md)" in (ROOT / "README.md").read_text()


def _texts(node: ast.AST) -> Iterator[str]:
    """Texts of a module; formatted values and %s count as holes."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            pieces = [str(v.value) if isinstance(v, ast.Constant) else _HOLE for v in part.values]
            yield "".join(pieces)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield re.sub(r"%[sd]|%g", _HOLE, part.value)


@cache
def _messages() -> tuple[str, ...]:
    return tuple(
        text
        for file in sorted((ROOT / "src").glob("**/*.py"))
        for text in _texts(ast.parse(file.read_text()))
    )


def _is_message(quoted: str) -> bool:
    """Whether a text in the sources has this in it, in which "..." stands for values."""
    parts = [re.escape(part) for part in " ".join(quoted.split()).strip(".").split("...")]
    pattern = re.compile(f"{_HOLE}+".join(parts))
    return any(pattern.search(text) for text in _messages())


def test_messages_in_the_guide_are_the_programs() -> None:
    guide = (ROOT / "docs/guide/troubleshooting.md").read_text()
    quoted = _MESSAGE.findall(guide)
    assert len(quoted) > 50
    wrong = [text for text in quoted if not _is_message(text)]
    assert not wrong


def test_a_message_that_is_not_there_is_found() -> None:
    assert _is_message("no such model: ... does not exist; give the path")
    assert not _is_message("no such model: ... does not exists")
    assert not _is_message("no such ... does not exist; give the path")


def test_the_tables_of_sizes_are_computed() -> None:
    guide = (ROOT / "docs/guide/sizing.md").read_text(encoding="utf-8")
    assert guide == with_tables(guide), "run python -m tools.sizing_tables"


def test_the_small_budget_of_the_guide(caplog: pytest.LogCaptureFixture) -> None:
    guide = (ROOT / "docs/guide/sizing.md").read_text()
    with (
        LLM("demo", memory="12MiB", device="cpu") as llm,
        pytest.raises(CapacityError) as refused,
    ):
        llm.generate([[5] * 300], SamplingParams(max_tokens=200))
    assert f"\n{refused.value}\n" in guide
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() in guide for record in warnings] == [True]


def test_the_figures_of_caches_are_those_of_the_benchmarks() -> None:
    guide = (ROOT / "docs/guide/choosing_a_cache.md").read_text()
    folder = ROOT / "benchmarks" / "gpu"

    def read(name: str) -> Any:
        return json.loads((folder / f"{name}.json").read_text())

    rows = []
    for model, label in (("llama-3-8b", "8B"), ("qwen3-0.6b", "0.6B")):
        steps: dict[int, list[float]] = {}
        for cache_name in ("virtual", "paged"):
            for batch in read(f"{model}-latency-{cache_name}")["batches"]:
                median = batch["aquifer"]["step_ms"]["median"]
                steps.setdefault(batch["num_prompts"], []).append(median)
        rows.append((f"decode step of the {label}, 1 sequence, ms", steps[1], 2))
        rows.append(("the same, 256 sequences, ms", steps[256], 2))
    sharing = read("sharing")
    both = [sharing["virtual"], sharing["paged"]]

    def median_ms(values: list[float]) -> float:
        return 1e3 * statistics.median(values)

    cached = [median_ms(each["cached_prompts"]["cached_s"]) for each in both]
    rows.append(("a prompt of 8192 tokens that is cached, 8B, to the first token, ms", cached, 1))
    eight = [median_ms(each["cached_prompts"]["eight_cached_s"]) for each in both]
    rows.append(("eight such requests at once, ms", eight, 0))
    back = [
        median_ms(swap["in_s"]) for each in both for swap in each["swaps"] if swap["tokens"] == 8192
    ]
    rows.append(("KV of 8192 tokens back from the host, 8B, ms", back, 1))
    for label, values, digits in rows:
        cells = " | ".join(f"{value:.{digits}f}" for value in values)
        assert f"| {label} | {cells} |" in guide
