"""The options of a drafter as a frozen dataclass: what a user may write, with its help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outpace.config import COMMON
from outpace.core.values import plain_entries
from outpace.errors import ConfigError, did_you_mean

Options = TypeVar("Options")


def option(default: Any, help: str) -> Any:
    """Returns the field of one option: its default and what it does, in a sentence."""
    return field(default=default, metadata={"help": help})


def needed(help: str) -> Any:
    """Returns the field of an option without which there is no such drafter."""
    return field(default=None, metadata={"help": help, "needed": True})


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a drafter, or of a length policy, without options."""


def make_options(kind: type[Options], given: Mapping[str, Any], method: str) -> Options:
    """Returns the options of a drafter; ``ConfigError`` for a name that it does not have, and for
    one that it needs and was not given.

    Values are checked by the dataclass itself; numpy's numbers are taken like Python's.
    """
    options = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [one.name for one in options]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"unknown key {name!r} in speculative_config for method {method!r}"
                f"{did_you_mean(name, [*names, *COMMON])}."
            )
    for one in options:
        if _is_needed(one) and given.get(one.name) is None:
            raise ConfigError(
                f"method {method!r} needs {one.name!r} in speculative_config. "
                f"{one.metadata['help']}"
            )
    return kind(**plain_entries(given))


def _is_needed(one: dataclasses.Field[Any]) -> bool:
    return bool(one.metadata.get("needed"))


@dataclass(frozen=True)
class Described:
    """One option as help texts and the documentation show it."""

    name: str
    default: Any
    help: str
    needed: bool = False


def described(kind: type[Any]) -> Iterator[Described]:
    """Yields the options of a drafter, those that it needs first, in the order of definition."""
    fields = dataclasses.fields(kind)
    for one in sorted(fields, key=lambda field: not _is_needed(field)):
        yield Described(one.name, one.default, one.metadata.get("help", ""), _is_needed(one))
