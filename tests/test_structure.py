"""The structure of the package: imports without circles, sizes of modules, and where bytes are
counted. What may import what is checked by import-linter, with the contracts in pyproject.toml."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
REPORTS = {"reports.py", "reporting.py"}
"""Modules of the engine that describe its memory in bytes, for people and metrics."""

MAX_LINES = 449


@cache
def _modules() -> dict[str, Path]:
    """All modules of the package, by name."""
    modules = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of modules, or of what is in them, that are imported when a module is.

    An import within a function is left out, since it is made when the function is called: by then
    both modules are there. One for type checkers alone is not, since it too makes a circle of what
    has to be understood together.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def _graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, of those named."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        imports = graph[module] = set()
        for name in _imported(ast.parse(source)):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources:
                imports.add(target)
    return graph


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of a circle, the first one at both ends; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_have_no_circle():
    graph = _graph({name: file.read_text() for name, file in _modules().items()})
    assert graph["aquifer.memory.pool"] >= {"aquifer.errors", "aquifer.memory.ledger"}
    assert not (circle := _circle(graph)), " <- ".join(circle)


@pytest.mark.parametrize(
    ("second", "has_circle"),
    [
        ("import pkg.first", True),
        ("from pkg import first", True),
        ("from pkg.first import name", True),
        ("if TYPE_CHECKING:\n    from pkg.first import name", True),
        ("class A:\n    import pkg.first", True),
        ("def f():\n    import pkg.first", False),
        ("from pkg import third", False),
    ],
)
def test_a_circle_is_found(second, has_circle):
    sources = {
        "pkg": "",
        "pkg.first": "from pkg.second import other",
        "pkg.second": second,
        "pkg.third": "import os",
    }
    circle = _circle(_graph(sources))
    assert set(circle) == ({"pkg.first", "pkg.second"} if has_circle else set())


def test_the_engine_counts_no_bytes():
    """It counts tokens and pages; every formula in bytes is in the cache (`footprint`)."""
    folder = SOURCE / "aquifer" / "engine"
    assert {file.name for file in folder.iterdir()} >= REPORTS
    names = re.compile(r"token_bytes|block_bytes|page_bytes")
    uses = {
        str(file.relative_to(folder)): sorted(set(names.findall(file.read_text())))
        for file in folder.rglob("*.py")
        if file.name not in REPORTS
    }
    assert not {file: found for file, found in uses.items() if found}


def test_no_module_but_a_kernel_is_long():
    """A kernel's module has its specification, its checks and its variants in one place."""
    lengths = {
        name: len(file.read_text().splitlines())
        for name, file in _modules().items()
        if not name.startswith("aquifer.kernels.")
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}
