"""The examples in the docstrings of all modules say what happens."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import outpace

ROOT = Path(outpace.__file__).parent


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
