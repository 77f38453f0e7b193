"""Flags that are made from the options of a dataclass (`outpace.core.options`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from outpace.cli.flags.speculation import parse_object
from outpace.core.options import Option, options_of
from outpace.errors import ParamsError

SINGULAR = {"stop_token_ids": "stop_token_id"}
"""Options whose flag may be given several times, each time with one value, and is called so."""

_METAVARS: Mapping[Any, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    list[int]: "ID",
    list[str]: "TEXT",
}


@dataclass(frozen=True)
class Flags:
    """Stands in the annotation of a verb's parameter: it is a dict of some options of a dataclass,
    each of which has a flag.

    >>> from outpace.core.params import SamplingParams
    >>> [one.name for one in Flags(SamplingParams, ("top_p",)).parameters()]
    ['top_p']
    """

    kind: type[Any]
    names: Sequence[str]
    panel: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Where the verb has others than the dataclass."""

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yields the parameters that Typer reads."""
        for one in self._options():
            default = self.defaults.get(one.name, one.default)
            type_, shown = _type(one), _flag(one, self.panel)
            several = type_ in (list[int], list[str])
            default = None if several and not default else default
            annotation: Any = Annotated[type_ | None if default is None else type_, shown]
            yield inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes the values of the flags out of what Typer gives a verb; returns the options."""
        return {one.name: _read(one, given.pop(one.name)) for one in self._options()}

    def _options(self) -> list[Option]:
        by_name = {one.name: one for one in options_of(self.kind)}
        return [by_name[name] for name in self.names]


def flag_of(kind: type[Any], name: str, panel: str | None = None) -> Any:
    """Returns the flag of one option of a dataclass, for the annotation of a parameter."""
    return _flag(next(one for one in options_of(kind) if one.name == name), panel)


def _flag(one: Option, panel: str | None) -> Any:
    return typer.Option(
        f"--{SINGULAR.get(one.name, one.name).replace('_', '-')}",
        metavar=_METAVARS.get(_type(one)) if one.kind != Mapping[int, float] else "JSON",
        help=one.help.replace("`", ""),
        rich_help_panel=panel,
    )


def _type(one: Option) -> Any:
    """The type that Typer reads for an option."""
    if one.kind in (bool, int, float, str):
        return one.kind
    if one.kind == Sequence[int]:
        return list[int]
    return str if one.kind == Mapping[int, float] else list[str]  # one text or several


def _read(one: Option, value: Any) -> Any:
    if value is None or value == []:
        return one.default
    return _by_token(one.name, value) if one.kind == Mapping[int, float] else value


LONGEST_ID = 18
"""Digits of a token's id, at most."""


def _by_token(name: str, text: str) -> dict[int, float]:
    """Returns numbers by token id from a JSON object, in which ids are strings."""
    flag = f"--{name.replace('_', '-')}"
    found = parse_object(flag, text, ParamsError)
    for token in found:
        digits = token.strip().removeprefix("-")
        if not (digits.isdecimal() and len(digits) <= LONGEST_ID):
            raise ParamsError(
                f'{flag} must name tokens by their ids, such as {{"50256": -100}}, not by '
                f"{token[:40]!r}."
            )
    return {int(token): value for token, value in found.items()}
