"""The scripts after the figures of the docs know the code of today and say what they are given."""

from __future__ import annotations

import ast
import inspect
import math
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "lab" / "measure"
SHARED = ("usage", "file_models", "gguf_copy")
"""What scripts import of each other."""
SCRIPTS = sorted(file for file in FOLDER.glob("*.py") if file.stem not in SHARED)


def imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yields what a script imports of outpace, under its names there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "outpace":
            continue
        module = import_module(node.module or "")
        for name in node.names:
            inner = f"{node.module}.{name.name}"
            found = getattr(module, name.name, None)
            yield name.asname or name.name, import_module(inner) if found is None else found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_uses_only_what_there_is(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    known = dict(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            there = owner is None or isinstance(node.ctx, ast.Store) or hasattr(owner, node.attr)
            assert there, f"line {node.lineno}: {node.value.id} has no {node.attr}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_calls_functions_as_they_are(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    known = dict(imported(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _called(node.func, known)
        if called is None or any(isinstance(one, ast.Starred) for one in node.args):
            continue
        if any(keyword.arg is None for keyword in node.keywords):
            continue
        try:
            expected = inspect.signature(called)
        except ValueError:  # a function of another language
            continue
        try:
            expected.bind(*node.args, **{one.arg or "": one.value for one in node.keywords})
        except TypeError as error:
            pytest.fail(f"line {node.lineno}: {ast.unparse(node)}: {error}")


def _called(function: ast.expr, known: dict[str, Any]) -> Any:
    """What a call calls; None where that is nothing of outpace, or is not known."""
    if isinstance(function, ast.Name):
        return known.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = known.get(function.value.id)
        return getattr(owner, function.attr, None) if inspect.ismodule(owner) else None
    return None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_says_how_it_is_called(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    try:
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("outpace", "policy", *SHARED):
            raise
        pytest.skip(f"needs {error.name}, which outpace does not")
    assert left.value.code == 0
    assert script.name in capsys.readouterr().out


def test_the_last_doubling_is_one_of_exactly_two() -> None:
    """Reports that stand at other places than half of the tokens are interpolated between."""
    doubling = runpy.run_path(str(FOLDER / "real_heads.py"))["_doubling"]
    rising = [(tokens, 1 + 0.1 * math.log2(tokens)) for tokens in (100, 190, 280, 370)]
    logs = [rising, [*rising, (400, 1.2)], [(50, 1.4), (100, 1.5)], [(100, 1.5)]]
    found = [
        doubling([{"tokens": at, "acceptance_length": score} for at, score in log]) for log in logs
    ]
    assert found == pytest.approx([0.1, 0.1 * math.log2(370 / 200), 0.1, 0.5])
