"""What can be called and what is answered: the command line, the server's description, names."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from rich.text import Text
from starlette.testclient import TestClient
from typer.testing import CliRunner

import outpace
from outpace import LLM

from . import inside

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
WIDTH = 600
"""Columns of the terminal: as many as keep each option on one line, whatever the others say."""
SHOWN_BY = ("typer", "rich")
"""Packages that lay out help texts."""
_LAYOUT = (
    (re.compile(r"([─━])\1+"), r"\1"),
    (re.compile(r" *([│┃]) *"), r" \1 "),
    (re.compile(r"  +"), "  "),
)
"""Lines around tables, and blanks, whose lengths follow from other lines; what is shown instead."""
OF_PROCESSOR = ("instructions", "threads")
"""What `LLM.describe` says of the machine, in every dtype."""
BY_PROCESSOR = ("kernels", "native_layers", "whole_model", "quantization", "blocks", "slow")
"""What depends on the machine in float32."""


# -- the command line --------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Returns every verb with its arguments, as declared: nothing of how a help text looks."""
    return {name: _command(each) for name, each in _verbs()}


def help_texts() -> dict[str, Any]:
    """Returns the help of every verb as lines of a terminal of `WIDTH` columns, without colours,
    and the versions of the packages that laid it out."""
    found: dict[str, Any] = {"versions": versions()}
    return {**found, **{name: shown(*name.split()[1:], "--help") for name, _ in _verbs()}}


def method_pages() -> dict[str, Any]:
    """Returns what ``outpace methods`` lists, and what it says of each name."""
    found: dict[str, Any] = {"versions": versions()}
    found["outpace methods"] = shown("methods")
    names = [*inside.methods(), *inside.rules(), *inside.lengths()]
    return {**found, **{f"outpace methods {name}": shown("methods", name) for name in names}}


def versions() -> dict[str, str]:
    """Returns the versions of the packages that lay out help texts."""
    return {name: version(name) for name in SHOWN_BY}


def shown(*arguments: str) -> list[str]:
    """Returns the lines that ``outpace`` prints with these arguments."""
    terminal = {"COLUMNS": str(WIDTH), "LINES": "50", "NO_COLOR": "1", "TERM": "xterm"}
    done = CliRunner().invoke(
        inside.command_line(), list(arguments), prog_name="outpace", env=terminal
    )
    assert done.exit_code == 0, (arguments, done.output)
    plain = Text.from_ansi(done.stdout).plain
    for pattern, instead in _LAYOUT:
        plain = pattern.sub(instead, plain)
    return [line.strip() for line in plain.splitlines()]


def _verbs() -> Iterator[tuple[str, Any]]:
    """Yields the name of each verb, "outpace bench run", and its command."""
    top = typer.main.get_command(inside.command_line())
    yield from _below("outpace", top, typer.Context(top, info_name="outpace"))


def _below(name: str, command: Any, context: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for verb in getattr(command, "list_commands", lambda context: [])(context):
        inner = command.get_command(context, verb)
        yield from _below(f"{name} {verb}", inner, type(context)(inner, parent=context))


def _command(command: Any) -> dict[str, Any]:
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    return {
        "help": (command.help or "").split("\n"),
        "parameters": {"/".join(each.opts): _parameter(each) for each in parameters},
    }


def _parameter(one: Any) -> str:
    """What is declared of one parameter, in a line; its type is in the words that stand for it."""
    said = ["flag" if getattr(one, "is_flag", False) else one.metavar or "value"]
    if one.secondary_opts:
        said.append(f"or {'/'.join(one.secondary_opts)}")
    said += [word for word in ("required", "multiple") if getattr(one, word, False)]
    said += [f"{word} {getattr(one, word)}" for word in ("min", "max") if _has(one, word)]
    if one.nargs != 1:
        said.append(f"nargs {one.nargs}")
    if one.default not in (None, False, ()):
        said.append(f"default {one.default!r}")
    return f"{', '.join(said)}: {getattr(one, 'help', None) or ''}"


def _has(one: Any, name: str) -> bool:
    return getattr(one, name, None) is not None


# -- the server and the bundled pair -----------------------------------------------------------


def openapi() -> Any:
    """Returns what a server answers at ``/openapi.json``."""
    app = inside.server(LLM(dtype="float64", device="cpu", max_model_len=256), "frozen")
    answer = TestClient(app, base_url="http://127.0.0.1:8000").get("/openapi.json")
    assert answer.status_code == 200
    found = answer.json()
    assert found["info"].pop("version") == outpace.__version__
    return found


def described() -> dict[str, Any]:
    """Returns what `LLM.describe` says of the bundled pair, as far as it is the same anywhere."""
    whole = LLM(dtype="float64", device="cpu").describe()
    usual = LLM(device="cpu").describe()
    found: dict[str, Any] = {
        "float64": _without(dataclasses.asdict(whole), OF_PROCESSOR),
        "as it comes": _without(dataclasses.asdict(usual), (*OF_PROCESSOR, *BY_PROCESSOR)),
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # as it is recorded


def _without(found: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: _without(value, names) if isinstance(value, Mapping) else value
        for name, value in found.items()
        if name not in names
    }


# -- names -------------------------------------------------------------------------------------


def names() -> dict[str, Any]:
    """Returns the names that users write in code, with their arguments, options and defaults."""
    from outpace import hf

    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return {
        "outpace": {name: _public(getattr(outpace, name)) for name in sorted(outpace.__all__)},
        "outpace.hf": {"speculative": _signature(hf.speculative)},
        "outpace.errors": {
            name: [base.__name__ for base in each.__mro__[1:-2]]
            for name, each in sorted(inside.errors().items())
        },
        "methods": inside.methods(),
        "rules": inside.rules(),
        "lengths": inside.lengths(),
        "entry points that others add to": inside.groups(),
        "scripts": project["scripts"],
        "entry points": {group: sorted(named) for group, named in project["entry-points"].items()},
        "extras": sorted(project["optional-dependencies"]),
    }


def _public(thing: Any) -> Any:
    """Returns what a user may call of a class, and with what; the kind of anything else."""
    if not isinstance(thing, type):
        return type(thing).__name__
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(thing):
        found["fields"] = {
            one.name: f"{one.type} = {_default(one)}" for one in dataclasses.fields(thing)
        }
    else:
        found["arguments"] = _signature(thing.__init__)
    for name, member in sorted(inspect.getmembers(thing, _is_callable_or_property)):
        if not name.startswith("_"):
            found[name] = "property" if isinstance(member, property) else _signature(member)
    return found


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default_factory is not dataclasses.MISSING:
        return f"{one.default_factory.__name__}()"
    return "(needed)" if one.default is dataclasses.MISSING else repr(one.default)


def _is_callable_or_property(member: Any) -> bool:
    return callable(member) or isinstance(member, property)


def _signature(function: Callable[..., Any]) -> list[str]:
    """Returns names, kinds and defaults of a function's arguments: not their annotations, which
    name types that move."""
    signature = inspect.signature(function)
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in signature.parameters.items()
        if name != "self"
    ]
    return [f"{each} ({each.kind.description})" for each in plain]
