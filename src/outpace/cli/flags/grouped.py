"""Flags in groups: a verb takes a dataclass, and the command line shows each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Returns the verb as Typer reads it: a parameter whose type is a dataclass becomes its fields.

    Several verbs share a group of flags by naming the same dataclass, and none of them needs a
    signature of forty parameters. A field's type is an ``Annotated`` option, as in `options`.
    """
    types = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}

    def flat(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        verb(**given, **made)

    shown = list(_parameters(verb, types, groups))
    flat.__name__, flat.__doc__, flat.__module__ = verb.__name__, verb.__doc__, verb.__module__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # Typer reads it
    return flat


def _parameters(
    verb: Callable[..., None], types: dict[str, Any], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.name in groups:
            yield from _fields(groups[parameter.name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            yield parameter.replace(annotation=types[parameter.name], kind=kind)


def _fields(group: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=types[field.name],
        )


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
