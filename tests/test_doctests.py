"""The examples in docstrings say what happens, and those in the documentation can be imported."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import outpace

ROOT = Path(outpace.__file__).parent
REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
IMPORT = re.compile(r"^\s*from (outpace[\w.]*) import ([\w, ]+)$", re.MULTILINE)
PAGES = [
    page
    for page in (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md")))
    if IMPORT.search(page.read_text("utf-8"))
]


def modules_with_examples() -> list[str]:
    """Returns the dotted names of all modules whose source shows an example."""
    files = sorted(path for path in ROOT.rglob("*.py") if ">>> " in path.read_text("utf-8"))
    dotted = (path.relative_to(ROOT.parent).with_suffix("").parts for path in files)
    return [".".join(parts).removesuffix(".__init__") for parts in dotted]


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0, f"{failed} examples of {name} failed; see the captured output"
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    assert any(test.examples for test in found), f"doctest finds no example in {name}"


def test_every_package_is_looked_at() -> None:
    packages = {name.split(".")[1] for name in modules_with_examples()}
    assert {"audit", "bench", "core", "engine", "policy", "targets", "verify"} <= packages


def exists(module: str, name: str) -> bool:
    """Returns whether ``from module import name`` works: a module's name, or a module in it."""
    found = importlib.import_module(module)
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_imports_exists(page: Path) -> None:
    for module, names in IMPORT.findall(page.read_text("utf-8")):
        missing = [name for name in names.replace(" ", "").split(",") if not exists(module, name)]
        assert not missing, f"{module} has no {', '.join(missing)}"


@pytest.mark.parametrize("page", ["python.md", "transformers.md"])
def test_the_examples_of_a_page_run(page: str) -> None:
    scope: dict[str, object] = {"__name__": "example"}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    for source in blocks:
        exec(source, scope)


def test_there_are_pages_with_imports() -> None:
    assert {"README.md", "audit.md"} <= {page.name for page in PAGES}
