"""Flags in groups: a verb takes a group as one parameter, and the command line shows each flag.

A flag that is an option of the library is made from the option's own declaration
(`outpace.core.options`): its type, its default, its help, and the check of its value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from outpace.cli.flags.speculation import parse_object
from outpace.core.options import Option, options_of
from outpace.errors import ConfigError, ParamsError

CALLED = {"stop_token_ids": "stop_token_id", "beam_width": "num_beams"}
"""Options whose flags have another name: the first may be given several times, each time with one
value."""

METAVARS: Mapping[str, str] = {
    "model": "ID_OR_PATH",
    "dtype": "TYPE",
    "device": "DEVICE",
    "device_map": "auto|JSON",
    "quantization": "KIND",
    "kv_cache_dtype": "KIND",
    "lora": "ID_OR_PATH",
    "generation_config": "WHICH",
    "max_model_len": "TOKENS",
    "scheduling_policy": "NAME",
    "early_stopping": "WHEN",
    "host": "HOST",
    "request_seconds": "S",
    "drain_seconds": "S",
    "logit_bias": "JSON",
    "structured_outputs": "JSON",
}
"""What stands for the value of a flag, where its type does not say enough."""

_OF_TYPES: Mapping[Any, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    list[int]: "ID",
    list[str]: "TEXT",
}
_WORDS = {"true": True, "false": False}


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
        yield from map(self.parameter, self.names)

    def parameter(self, name: str) -> inspect.Parameter:
        """Returns the parameter that Typer reads for one of them."""
        one = _option(self.kind, name)
        default, type_ = self._default(one), _type(one)
        if (type_ in (list[int], list[str]) and not default) or (
            type_ is bool and not isinstance(default, bool)
        ):
            default = None
        shown = flag_of(self.kind, name, self.panel)
        annotation: Any = Annotated[type_ | None if default is None else type_, shown]
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes the values of the flags out of what Typer gives a verb; returns the options."""
        return {name: self.value(name, given.pop(name)) for name in self.names}

    def value(self, name: str, given: Any) -> Any:
        """Returns an option from what Typer gives for its flag; raises the error of a value that it
        does not take, where no model is needed to know."""
        one = _option(self.kind, name)
        if given is None or given == []:
            return self._default(one)
        if one.kind == Mapping[int, float]:
            given = _by_token(name, given)
        entries = Mapping[str, Any] in (one.kind, *get_args(one.kind))
        if entries and isinstance(given, str) and given.strip().endswith(("}", ".json")):
            given = parse_object(flag_name(name), given.strip(), ConfigError)
        if isinstance(given, str) and bool in get_args(one.kind):
            given = _WORDS.get(given.lower(), given)
        one.read(given, ConfigError, flag_name(name))
        return given

    def _default(self, one: Option) -> Any:
        return self.defaults.get(one.name, one.default)


def flag_of(kind: type[Any], name: str, panel: str | None = None) -> Any:
    """Returns the flag of one option of a dataclass, for the annotation of a parameter."""
    one = _option(kind, name)
    flag = flag_name(name)
    declared = [f"{flag}/{flag_name(f'no_{name}')}" if _may_be_unset(one) else flag]
    declared += ["-m"] if name == "model" else []
    return typer.Option(
        *declared,
        metavar=METAVARS.get(name, _OF_TYPES.get(_type(one))),
        help=one.help.replace("`", ""),
        rich_help_panel=panel,
        show_default=not _may_be_unset(one),
    )


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Returns the verb as Typer reads it. A parameter whose type is a dataclass becomes its fields,
    and one that is annotated with `Flags` becomes those, and the verb gets a dict.

    Several verbs share a group of flags by naming the same one, and none of them needs a signature
    of forty parameters. A field's type is an ``Annotated`` typer.Option; or it is an option of the
    dataclass that the group names as ``declared_in``, and has the flag of that.
    """
    types = get_type_hints(verb, include_extras=True)
    shown: list[inspect.Parameter] = []
    readers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for one in inspect.signature(verb).parameters.values():
        kind = types[one.name]
        flags = next((each for each in _said(kind) if isinstance(each, Flags)), None)
        if flags is not None:
            shown += flags.parameters()
            readers[one.name] = flags.read
        elif is_dataclass(kind):
            shown += _fields(kind)
            readers[one.name] = partial(_made, kind)
        else:
            shown.append(one.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def flat(**given: Any) -> None:
        made = {name: read(given) for name, read in readers.items()}
        verb(**given, **made)

    flat.__name__, flat.__doc__, flat.__module__ = verb.__name__, verb.__doc__, verb.__module__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # Typer reads it
    return flat


def _said(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Annotated else ()


def _declared(group: Any) -> Flags:
    """The flags of a group that are options of ``declared_in``: the fields without a typer.Option
    of their own."""
    types = get_type_hints(group, include_extras=True)
    names = [one.name for one in fields(group) if not _said(types[one.name])]
    return Flags(getattr(group, "declared_in", None) or group, names, getattr(group, "panel", None))


def _fields(group: Any) -> Iterator[inspect.Parameter]:
    types, flags = get_type_hints(group, include_extras=True), _declared(group)
    for one in fields(group):
        if one.name in flags.names:
            yield flags.parameter(one.name)
            continue
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(one.name, kind, default=default, annotation=types[one.name])


def _made(group: Any, given: dict[str, Any]) -> Any:
    values = _declared(group).read(given)
    rest = {one.name: given.pop(one.name) for one in fields(group) if one.name not in values}
    return group(**values, **rest)


def _option(kind: type[Any], name: str) -> Option:
    return next(one for one in options_of(kind) if one.name == name)


def flag_name(name: str) -> str:
    return f"--{CALLED.get(name, name).replace('_', '-')}"


def _may_be_unset(one: Option) -> bool:
    """Whether it is a switch that is neither on nor off by default."""
    return bool in get_args(one.kind) and one.default is not None


def _type(one: Option) -> Any:
    """The type that Typer reads for an option."""
    if one.kind in (bool, int, float, str):
        return one.kind
    if one.kind == Sequence[int]:
        return list[int]
    if one.kind == str | Sequence[str]:
        return list[str]  # one text or several
    return bool if _may_be_unset(one) else str


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
