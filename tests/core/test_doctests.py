"""The examples in the docstrings say what happens."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import outpace.core
import outpace.errors
import outpace.verify

MODULES = [
    "outpace.errors",
    *(
        module.name
        for package in (outpace.core, outpace.verify)
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0, f"{failed} examples of {name} failed; see the captured output"


def test_there_are_examples_to_run() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = [n for n in MODULES if n.startswith("outpace.core")]
    found = [t for n in names for t in finder.find(importlib.import_module(n)) if t.examples]
    assert len(found) >= 5, f"only {len(found)} docstrings of outpace.core have an example"
