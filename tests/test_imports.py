"""The rooms of the library, who may import whom, and that importing does nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import outpace
from processes import START_SECONDS

ROOT = Path(outpace.__file__).parent

# core <- targets <- heads <- verify, train <- draft <- policy <- engine <- llm
# <- audit, bench, serve, tune <- cli; draft <- methods, which only those import that choose one
# by its type; serve <- ray <- cli.
# A drafter knows targets only where it runs a model of its own.
_ENGINE = {"core", "heads", "verify", "targets", "train", "draft", "policy"}
_ARGUMENTS = {"arguments", "config", "forms", "inputs"}
_UNDER_API = {"building", "bundled", "engine", "generation", "input_processor", "outputs"}
_API = {*_ENGINE, *_ARGUMENTS, *_UNDER_API}
_FACE = {*_API, "llm", "files", "inspection"}
_TOOLS = {*_FACE, "methods", "hf", "audit", "bench", "serve", "tune"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": set(),
    "verify": {"core", "heads"},
    "heads": {"core", "files", "targets"},
    "targets": {"core"},
    "train": {"core", "files", "heads", "inputs", "targets"},
    "draft": {"config", "core", "files", "heads", "targets", "train"},
    "methods": {"config", "core", "draft", "files", "heads", "inputs", "targets", "train"},
    "policy": {"config", "core", "draft", "heads", "targets"},
    "engine": _ENGINE,
    "config": {"core"},
    "files": set(),
    "inputs": {"core", "files", "targets"},
    "arguments": {*_ENGINE, "config"},
    "input_processor": {*_ENGINE, *_ARGUMENTS, "engine"},
    "forms": {"core"},
    "building": {*_ENGINE, "methods", "arguments", "config", "engine", "input_processor"},
    "outputs": {*_ENGINE, "engine"},
    "generation": {*_ENGINE, *_ARGUMENTS, "engine", "input_processor", "outputs"},
    "bundled": {"targets"},
    "llm": _API,
    "inspection": {"core", "draft", "heads", "methods", "targets"},
    "hf": {*_FACE, "methods"},
    "lm_eval": {"core", "llm"},
    "audit": _TOOLS - {"serve", "tune"},
    "bench": _TOOLS - {"serve", "tune"},
    "serve": _TOOLS - {"tune"},
    "tune": {*_FACE, "methods", "bench"},
    "ray": {*_FACE, "serve"},
    "cli": {*_TOOLS, "ray"},
}
MAY_IMPORT_TRANSFORMERS = {"targets", "hf", "train", "audit", "bench", "bundled"}
CORE_PACKAGES = {"torch", "numpy", "annotated_types"}
"""All that core may import besides the standard library and `outpace.errors`."""


def room_of(module: str) -> str:
    """Returns the part of ``outpace`` that a name belongs to; "" for the package itself.

    The package's public names (``from outpace import LLM``) are the face: "llm".
    """
    room = module.split(".")[1] if "." in module else ""
    if room.startswith("__") or not room:
        return ""
    return room if (ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file() else "llm"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and full name of every import in a file, those inside functions too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            # `from outpace import core` names a room as much as `import outpace.core` does.
            deep = source == "outpace"
            yield from ((node.lineno, f"{source}.{a.name}" if deep else source) for a in node.names)


FILES = sorted(ROOT.rglob("*.py"))


@cache
def all_imports() -> list[tuple[Path, int, str]]:
    return [(path, line, name) for path in FILES for line, name in imports_of(path)]


def where(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT.parent)}:{line} imports {name}"


def test_each_room_imports_only_the_rooms_below_it() -> None:
    wrong = []
    for path, line, name in all_imports():
        here, there = room_of(module_of(path)), room_of(name)
        if name.partition(".")[0] != "outpace" or here in ("", there) or there in ("", "errors"):
            continue
        if there not in MAY_IMPORT.get(here, set()):
            allowed = ", ".join(sorted(MAY_IMPORT.get(here, set()))) or "no other room"
            wrong.append(f"{where(path, line, name)}; {here} may import: {allowed}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(module_of(path)) for path in FILES} - {""}
    missing = rooms - set(MAY_IMPORT)
    assert not missing, f"say in MAY_IMPORT what {sorted(missing)} may import"


def test_the_table_has_no_cycle_below_the_tools() -> None:
    order = [
        "errors",
        "core",
        "verify",
        "targets",
        "train",
        "draft",
        "methods",
        "policy",
        "engine",
        "llm",
        "cli",
    ]
    upward = [
        f"{low} may import {high}"
        for index, low in enumerate(order)
        for high in order[index + 1 :]
        if high in MAY_IMPORT[low]
    ]
    assert not upward, upward


def test_the_engine_the_rules_and_the_audit_know_models_through_the_protocol_only() -> None:
    """What a pass is made of is the business of targets, and of drafters with models of their own.
    The one other thing that the engine gets from there is how passes are recorded."""
    asked = {("outpace.engine.capture", "outpace.targets.hf.fixed")}
    wrong = [
        where(path, line, name)
        for path, line, name in all_imports()
        if room_of(module_of(path)) in ("verify", "policy", "engine", "audit")
        and name.startswith("outpace.targets")
        and name != "outpace.targets.base"
        and (module_of(path), name) not in asked
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_core_imports_torch_numpy_and_little_else() -> None:
    allowed = {*CORE_PACKAGES, *sys.stdlib_module_names}
    wrong = [
        where(path, line, name)
        for path, line, name in all_imports()
        if room_of(module_of(path)) == "core"
        and name.partition(".")[0] not in allowed
        and not name.startswith(("outpace.core", "outpace.errors"))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_only_models_and_the_faces_to_it_import_transformers() -> None:
    wrong = [
        where(path, line, name)
        for path, line, name in all_imports()
        if name.partition(".")[0] == "transformers"
        and room_of(module_of(path)) not in MAY_IMPORT_TRANSFORMERS
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", ["outpace", "outpace.core"])
def test_importing_changes_nothing(package: str) -> None:
    script = f"""
import importlib, pkgutil, random, sys, warnings
import numpy, torch
warnings.simplefilter("error")
def state():
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
        torch.get_num_interop_threads(), torch.is_grad_enabled(),
        torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()),
        torch.are_deterministic_algorithms_enabled(), list(warnings.filters),
    )
before = state()
package = importlib.import_module("{package}")
if "{package}" == "outpace.core":
    for module in pkgutil.iter_modules(package.__path__, "outpace.core."):
        importlib.import_module(module.name)
assert state() == before, "importing {package} changed global state"
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert "transformers" not in loaded, "importing {package} loads transformers"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=START_SECONDS
    )
    assert done.returncode == 0, done.stderr
