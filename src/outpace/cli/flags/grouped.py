"""Flags in groups: a verb takes a group as one parameter, and the command line shows each flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from outpace.cli.flags.declared import Flags


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Returns the verb as Typer reads it. A parameter whose type is a dataclass becomes its fields,
    and one that is annotated with `Flags` becomes those, and the verb gets a dict.

    Several verbs share a group of flags by naming the same one, and none of them needs a signature
    of forty parameters. A field's type is an ``Annotated`` option, as in `options`.
    """
    types = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    declared = {name: found for name, kind in types.items() if (found := _flags(kind))}

    def flat(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        made |= {name: flags.read(given) for name, flags in declared.items()}
        verb(**given, **made)

    shown = list(_parameters(verb, types, groups, declared))
    flat.__name__, flat.__doc__, flat.__module__ = verb.__name__, verb.__doc__, verb.__module__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # Typer reads it
    return flat


def _flags(kind: Any) -> Flags | None:
    said = get_args(kind) if get_origin(kind) is Annotated else ()
    return next((one for one in said if isinstance(one, Flags)), None)


def _parameters(
    verb: Callable[..., None],
    types: dict[str, Any],
    groups: dict[str, Any],
    declared: dict[str, Flags],
) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.name in groups:
            yield from _fields(groups[parameter.name])
        elif parameter.name in declared:
            yield from declared[parameter.name].parameters()
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
