"""Options, each declared once: a field of a dataclass, with its type, its bounds and a docstring.

    top_p: Annotated[float | None, Gt(0), Le(1)] = None
    \"\"\"Keep the fewest most probable tokens whose mass reaches top_p.\"\"\"

Whatever shows or checks an option reads that declaration: the check of a value (`read_options`),
the command line's flag (`outpace.cli.flags.grouped`), the server's JSON schema
(`Option.schema`), ``outpace methods NAME``, and the tables of docs/options.md
(``python -m tests.option_tables``). Bounds are those of `annotated_types`; a field whose values
need more than a type and bounds says so with `Reads`. A field without a default has to be given.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt

from outpace.core.values import (
    flag,
    integer,
    interval,
    number,
    plain_entries,
    shown,
    texts,
    token_ids,
)
from outpace.errors import ConfigError, OutpaceError, ParamsError, did_you_mean

Reader = Callable[[str, Any], Any]
"""Makes of an option's name and value what the engine works with; raises for what is none."""

Class = TypeVar("Class")
P = ParamSpec("P")


@dataclass(frozen=True)
class Reads:
    """What a field takes, where a type and bounds do not say it all."""

    reader: Reader
    schema: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The same as a JSON schema, as far as JSON Schema can say it."""


@dataclass(frozen=True)
class Off:
    """The value with which an option changes nothing: what None stands for where the model says
    nothing either."""

    value: Any


@dataclass(frozen=True)
class Option:
    """One option of a dataclass."""

    owner: Any
    """The dataclass."""
    name: str
    kind: Any
    """Its type, without None."""
    bounds: tuple[Any, ...]
    """What its annotation says besides."""
    default: Any
    may_be_none: bool
    needed: bool
    """Whether it has to be given."""

    @property
    def text(self) -> str:
        """Its docstring, each paragraph in one line."""
        return docstrings(self.owner).get(self.name, "")

    @property
    def help(self) -> str:
        """What it does: the first paragraph of its docstring."""
        return self.text.split("\n\n")[0]

    @property
    def off(self) -> Any:
        """The value with which it changes nothing, or None."""
        return next((bound.value for bound in self.bounds if isinstance(bound, Off)), None)

    def read(self, value: Any, error: type[OutpaceError] = ParamsError, label: str = "{}") -> Any:
        """Returns a value as the engine works with it; raises for one that the option does not
        take. numpy's numbers are taken like Python's. label: what errors call the option, with {}
        for its name."""
        if value is None and self.may_be_none:
            return None
        try:
            return self._checked(value, error, label.format(self.name))
        except OutpaceError as raised:
            raised.about(self.name)
            raise

    def _checked(self, value: Any, error: type[OutpaceError], name: str) -> Any:
        own = next((bound for bound in self.bounds if isinstance(bound, Reads)), None)
        if own is not None:
            return own.reader(name, value)
        words, kinds = _parts(self.kind)
        if not words:
            return self._read(kinds[0], name, value, error)
        if isinstance(value, str) and value in words:
            return value
        for kind in kinds:  # what may stand in the place of the words
            try:
                return self._read(kind, name, value, error)
            except OutpaceError:
                continue
        *others, last = self._allowed(words, kinds)
        wanted = f"{', '.join(others)} or {last}" if others else last
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        hint = hint if "did you mean" in hint else ""
        raise error(f"{name} must be {wanted}, not {shown(value)}{hint}.")

    def _read(self, kind: Any, name: str, value: Any, error: type[OutpaceError]) -> Any:
        """Reads a value of one type."""
        if kind is Any:
            return value
        if kind is bool:
            return flag(name, value, error=error)
        if kind is int:
            return integer(name, value, *self._integer_bounds(), error=error)
        if kind is float:
            low, high, closed, below = self._bounds()
            return number(name, value, low, high, closed=closed, below=below, error=error)
        if kind is str:
            if not isinstance(value, str) or not value:
                raise error(f"{name} must be a text, not {shown(value)}.")
            return value
        if kind == Sequence[int]:
            return token_ids(name, value, error)
        if kind == Sequence[str]:
            return texts(name, value, error)
        raise TypeError(f"no values of the type {kind} are read: say how with Reads")

    def _allowed(self, words: list[str], kinds: list[Any]) -> list[str]:
        """What a value may be where it may be one of some words, for an error's sentence."""
        found = ["True", "False"] if bool in kinds else []
        found += map(repr, words)
        if int in kinds:
            low, high = self._integer_bounds()
            upward = "" if low is None else f" from {low}" + ("" if high is None else f" to {high}")
            found.append(f"a whole number{upward}")
        if float in kinds:
            found.append(interval(*self._bounds()))
        return [*found, "None"] if self.may_be_none and self.default is not None else found

    @property
    def range(self) -> str:
        """Its bounds in words; empty without any.

        >>> Option(None, "top_p", float, (Gt(0), Le(1)), None, True, False).range
        'above 0, up to 1'
        """
        low, high, closed, below = self._bounds()
        words = [] if math.isinf(low) else [f"{'from' if closed else 'above'} {_plain(low)}"]
        words += [] if math.isinf(high) else [f"{'below' if below else 'up to'} {_plain(high)}"]
        return ", ".join(words)

    @property
    def schema(self) -> dict[str, Any]:
        """What it takes, as a JSON schema."""
        own = next((bound for bound in self.bounds if isinstance(bound, Reads)), None)
        if own is not None:
            return dict(own.schema)
        words, kinds = _parts(self.kind)
        found: list[dict[str, Any]] = [{"type": "string", "enum": words}] if words else []
        found += [{**_SCHEMAS[kind], **self._schema_bounds(kind)} for kind in kinds]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _bounds(self) -> tuple[float, float, bool, bool]:
        """The lowest and the highest number, whether the lowest itself is allowed, and whether the
        highest is not."""
        low, high, closed, below = -math.inf, math.inf, True, False
        for bound in self.bounds:
            if isinstance(bound, Ge):
                low = bound.ge  # type: ignore[assignment]
            elif isinstance(bound, Gt):
                low, closed = bound.gt, False  # type: ignore[assignment]
            elif isinstance(bound, Le):
                high = bound.le  # type: ignore[assignment]
            elif isinstance(bound, Lt):
                high, below = bound.lt, True  # type: ignore[assignment]
        return low, high, closed, below

    def _integer_bounds(self) -> tuple[int | None, int | None]:
        low: Any = None
        high: Any = None
        for bound in self.bounds:
            if isinstance(bound, Ge):
                low = bound.ge
            elif isinstance(bound, Gt):
                low = bound.gt + 1  # type: ignore[operator]
            elif isinstance(bound, Le):
                high = bound.le
            elif isinstance(bound, Lt):
                high = bound.lt - 1  # type: ignore[operator]
        return low, high

    def _schema_bounds(self, kind: Any) -> dict[str, Any]:
        if kind not in (int, float):
            return {}
        names = {Ge: "minimum", Gt: "exclusiveMinimum", Le: "maximum", Lt: "exclusiveMaximum"}
        return {
            names[type(bound)]: dataclasses.astuple(bound)[0]
            for bound in self.bounds
            if type(bound) in names
        }


def _plain(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string", "minLength": 1},
    Sequence[int]: {"type": "array", "items": {"type": "integer", "minimum": 0}},
    Sequence[str]: {"type": "array", "items": {"type": "string", "minLength": 1}},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that are checked as they are made, such as a drafter's. A check of several together
    stands in a ``__post_init__`` after this one's. The class itself is for what has no options."""

    def __post_init__(self) -> None:
        read_options(self, ConfigError)


def takes(
    kind: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Returns a decorator of a method that makes a dataclass of all of its arguments: it is shown
    with the dataclass's signature."""

    def shown_so(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own, declared = inspect.signature(method), inspect.signature(kind)
        me = next(iter(own.parameters.values()))
        method.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[me, *declared.parameters.values()]
        )
        return method

    return shown_so


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """Returns the options of a dataclass in the order of definition; none of another class."""
    found: Any = kind  # mypy does not count a type[Any] as hashable
    return _options_of(found)


@cache
def _options_of(kind: Any) -> tuple[Option, ...]:
    if not hasattr(kind, "__dataclass_fields__"):
        return ()
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_option(kind, one, hints[one.name]) for one in dataclasses.fields(kind))


def _option(kind: Any, one: dataclasses.Field[Any], hint: Any) -> Option:
    bounds: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        bounds = tuple(rest)
    default: Any = one.default
    if one.default_factory is not dataclasses.MISSING:
        default = one.default_factory()
    needed = default is dataclasses.MISSING
    default = None if needed else default
    optional = _is_optional(hint) or (default is None and not needed)
    return Option(kind, one.name, _not_none(hint), bounds, default, optional, needed)


def described(kind: type[Any]) -> Iterator[Option]:
    """Yields the options of a dataclass, those that are needed first, in the order of definition;
    none of a class that is no dataclass."""
    yield from sorted(options_of(kind), key=lambda one: not one.needed)


def read_options(given: Any, error: type[OutpaceError] = ParamsError) -> None:
    """Checks the options of a frozen dataclass in its ``__post_init__``, and puts what the engine
    works with in the place of what was given."""
    for one in options_of(type(given)):
        object.__setattr__(given, one.name, one.read(getattr(given, one.name), error))


def make_options(
    kind: type[Class],
    given: Mapping[str, Any],
    unknown: str,
    needs: str = "",
    label: str = "{}",
    others: Iterable[str] = (),
) -> Class:
    """Returns the options that a user has written as a dict; ``ConfigError`` for a name that there
    is not, for one that has to be given and was not, and for a bad value. numpy's scalars are taken
    like Python's.

    unknown, needs: the sentences of the first two, with {} for the name. label: what errors call an
    option, with {} for its name. others: names that the user may have meant besides.
    """
    options = options_of(kind)
    names = [one.name for one in options]
    for name in given:
        if name not in names:
            known = [*names, *others]
            hint = did_you_mean(name, known) if known else ": it has no options"
            raise ConfigError(f"{unknown.format(repr(name))}{hint}.")
    read = plain_entries(given)
    for one in options:
        if one.needed and read.get(one.name) is None:
            raise ConfigError(f"{needs.format(repr(one.name))}. {one.help}")
        if one.name in read:
            read[one.name] = one.read(read[one.name], ConfigError, label)
    return kind(**read)


@cache
def docstrings(kind: Any) -> Mapping[str, str]:
    """Returns what stands below the fields of a class, by name, each paragraph in one line: also
    of those that it inherits.

    >>> docstrings(Option)["kind"]
    'Its type, without None.'
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not hasattr(base, "__dataclass_fields__"):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # it was made without a file
            continue
        body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
        for one, below in pairwise(body):
            match one, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    paragraphs = inspect.cleandoc(text).split("\n\n")
                    found[name] = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    return found


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


def _not_none(hint: Any) -> Any:
    if not _is_optional(hint):
        return hint
    rest = [part for part in get_args(hint) if part is not NoneType]
    return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007  # of a list


def _parts(kind: Any) -> tuple[list[str], list[Any]]:
    """Returns the words that a type allows, and the other types that it is made of."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return words, [part for part in parts if get_origin(part) is not Literal]
