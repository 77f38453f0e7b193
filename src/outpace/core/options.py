"""Options as fields of a dataclass: what a user may write, with its help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str) -> Any:
    """Returns the field of one option: its default and what it does, in a sentence."""
    return field(default=default, metadata={"help": help})


def needed(help: str) -> Any:
    """Returns the field of an option that has to be given."""
    return field(default=None, metadata={"help": help, "needed": True})


def is_needed(one: dataclasses.Field[Any]) -> bool:
    """Whether an option has to be given."""
    return bool(one.metadata.get("needed"))


@dataclass(frozen=True)
class Described:
    """One option as help texts and the documentation show it."""

    name: str
    default: Any
    help: str
    needed: bool = False


def described(kind: type[Any]) -> Iterator[Described]:
    """Yields the options of a dataclass, those that are needed first, in the order of definition;
    none of a class that is no dataclass."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    for one in sorted(fields, key=lambda field: not is_needed(field)):
        yield Described(one.name, one.default, one.metadata.get("help", ""), is_needed(one))
