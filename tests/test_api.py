"""What `import aquifer` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import aquifer
import aquifer.errors

ROOT = Path(__file__).parents[1]


def _modules_after(statement: str) -> set[str]:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {statement}; print(*sys.modules)"
    )
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_all_is_what_there_is():
    for name in aquifer.__all__:
        assert getattr(aquifer, name) is not None
    public = {name for name in dir(aquifer) if not name.startswith("_")}
    submodules = {path.stem for path in (ROOT / "src" / "aquifer").iterdir()}
    helpers = {"annotations", "importlib", "Any", "TYPE_CHECKING"}
    assert public - submodules - helpers == set(aquifer.__all__) - {"__version__"}


def test_every_exception_is_public():
    defined = {
        name
        for name, value in vars(aquifer.errors).items()
        if isinstance(value, type) and issubclass(value, aquifer.AquiferError)
    }
    assert defined <= set(aquifer.__all__)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="LMM"):
        aquifer.LMM  # noqa: B018


def test_version_is_the_package_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert aquifer.__version__ == project["version"]


def test_importing_aquifer_is_cheap():
    modules = _modules_after("import aquifer")
    assert not modules & {"torch", "transformers", "numpy", "fastapi", "pydantic", "rich", "typer"}


@pytest.mark.parametrize("module", ["server", "web"])
def test_the_web_process_does_without_torch_and_transformers(module):
    assert not {"torch", "transformers"} & _modules_after(f"import aquifer.serve.{module}")


def test_the_command_line_starts_without_torch_and_web():
    assert not _modules_after("import aquifer.cli") & {"torch", "transformers", "fastapi"}
