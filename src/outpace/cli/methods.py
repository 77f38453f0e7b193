"""``outpace methods``: what may draft and verify, how much is drafted, and the options of each."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from outpace.cli.flags.names import LOSSLESS, LOSSY, METHODS, installed
from outpace.cli.loading import starting
from outpace.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from outpace.core.options import Option

Entry = tuple[str, type[Any], "list[Option]"]
"""Where a name is given, what it stands for, and the options of that."""


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A method, rule or length policy, whose options to list."
        ),
    ] = None,
) -> None:
    """List the methods and rules, or the options of one, with their defaults.

    Options stand in --speculative-config, with "method": {"method": "ngram",
    "prompt_lookup_max": 5}; those of a rule or a length policy in its own entry: "verify":
    {"name": "ears", "tolerance": 0.1}.
    """
    console = Console()
    if name is None:
        console.print(_names("--method", {**METHODS, **installed("outpace.drafters")}))
        rules = {**LOSSLESS, **{each: f"lossy: {what}" for each, what in LOSSY.items()}}
        console.print(_names("--verify", {**rules, **installed("outpace.rules")}))
        console.print(_names('"length"', _lengths()))
        return
    for place, kind, options in _found(name):
        console.print(f"{place}: {_doc(kind)}", markup=False, highlight=False)
        console.print(_table(options) if options else "It has no options.", end="\n\n")


def _names(title: str, names: Mapping[str, str]) -> Table:
    made = Table(title=title, title_justify="left", show_header=False, box=None)
    made.add_column(no_wrap=True)
    for each, what in names.items():
        made.add_row(each, what)
    return made


def _lengths() -> dict[str, str]:
    with starting():
        from outpace.policy.lengths.registry import find_length, length_names
    return {name: _first_sentence(find_length(name)) for name in length_names()}


def _doc(kind: type[Any]) -> str:
    """What is said of a class, in paragraphs that the terminal may break; formulas stay."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    whole = [text if text.startswith(" ") else " ".join(text.split()) for text in paragraphs]
    return "\n\n".join(whole)


def _first_sentence(kind: type[Any]) -> str:
    return _doc(kind).split("\n\n")[0].split(". ")[0].rstrip(".:")


def _found(name: str) -> list[Entry]:
    """Everything of this name; ``ConfigError`` if there is nothing."""
    found = list(_with_name(name))
    if found:
        return found
    known = [each for _, names, _ in _all() for each in names]
    raise ConfigError(
        f"there is no method, rule or length policy {name!r}{did_you_mean(name, known)}. "
        "'outpace methods' lists all."
    )


def _all() -> list[tuple[str, list[str], Callable[[str], type[Any]]]]:
    """Returns for each place the names there, and what returns the class of one."""
    with starting():
        from outpace.draft.registry import drafter_names, find_drafter
        from outpace.policy.lengths.registry import find_length, length_names
        from outpace.verify.registry import find_rule, rule_names
    return [
        ("method", drafter_names(), find_drafter),
        ("verify", rule_names(), find_rule),
        ("length", length_names(), find_length),
    ]


def _with_name(name: str) -> Iterator[Entry]:
    from outpace.core.options import described

    for place, names, find in _all():
        if name not in names:
            continue
        kind = find(name)
        # A rule's options are its own fields.
        yield place, kind, list(described(kind if place == "verify" else kind.Options))


def _table(options: list[Option]) -> Table:
    made = Table(Column("option", overflow="fold"), "default", "")  # a name is there to be copied
    for one in options:
        default = "(needed)" if one.needed else json.dumps(one.default, default=str)
        made.add_row(one.name, default, f"{one.help} ({one.range})" if one.range else one.help)
    return made
