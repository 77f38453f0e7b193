"""Options, each declared once: a field of a dataclass, with its type, its bounds and a docstring.

    top_p: Annotated[float | None, Gt(0), Le(1)] = None
    \"\"\"Keep the fewest most probable tokens whose mass reaches top_p.\"\"\"

Whatever shows or checks an option reads that declaration: the check of a value (`read_options`),
the command line's flag (`outpace.cli.flags.declared`), the server's JSON schema
(`Option.schema`), ``outpace methods NAME``, and the tables of docs/options.md. Bounds are those of
`annotated_types`; a field whose values need more than a type and bounds says so with `Reads`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from outpace.core.values import flag, is_whole, number, shown, texts, token_ids, whole
from outpace.errors import OutpaceError, ParamsError

Reader = Callable[[str, Any], Any]
"""Makes of an option's name and value what the engine works with; raises for what is none."""


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

    name: str
    kind: Any
    """Its type, without None."""
    bounds: tuple[Any, ...]
    """What its annotation says besides."""
    default: Any
    help: str
    """What it does: its docstring, in one line."""
    needed: bool = False

    @property
    def off(self) -> Any:
        """The value with which it changes nothing, or None."""
        return next((bound.value for bound in self.bounds if isinstance(bound, Off)), None)

    def read(self, value: Any, error: type[OutpaceError] = ParamsError) -> Any:
        """Returns a value as the engine works with it; raises for one that the option does not
        take. numpy's numbers are taken like Python's."""
        own = next((bound for bound in self.bounds if isinstance(bound, Reads)), None)
        if own is not None:
            return own.reader(self.name, value)
        words, kinds = _parts(self.kind)
        if isinstance(value, str) and value in words:
            return value
        if words and kinds in ([], [int]):
            return self._word_or_count(words, kinds, value, error)
        (kind,) = kinds
        if kind is bool:
            return flag(self.name, value, error=error)
        if kind is int:
            return whole(self.name, value, *self._whole_bounds(), error=error)
        if kind is float:
            low, high, closed, below = self._bounds()
            return number(self.name, value, low, high, closed=closed, below=below, error=error)
        if kind is str:
            if not isinstance(value, str) or not value:
                raise error(f"{self.name} must be a text, not {shown(value)}.").about(self.name)
            return value
        if kind == Sequence[int]:
            return token_ids(self.name, value)
        if kind == Sequence[str]:
            return texts(self.name, value)
        raise TypeError(f"no values of the type {kind} are read: say how with Reads")

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

    def _word_or_count(
        self, words: list[str], kinds: list[Any], value: Any, error: type[OutpaceError]
    ) -> Any:
        """Reads one of some words, or in their place a whole number."""
        low, high = self._whole_bounds()
        if kinds and is_whole(value) and _is_within(value, low, high):
            return int(value)
        wanted = [repr(word) for word in words]
        if kinds:
            upward = "" if low is None else f" from {low}" + ("" if high is None else f" to {high}")
            wanted.append(f"a whole number{upward}")
        *others, last = wanted
        named = f"{', '.join(others)} or {last}" if others else last
        raise error(f"{self.name} must be {named}, not {shown(value)}.").about(self.name)

    def _bounds(self) -> tuple[float, float, bool, bool]:
        """The lowest and the highest number, whether the lowest itself is allowed, and whether the
        highest is not."""
        low, high, closed, below = -math.inf, math.inf, True, False
        for bound in self.bounds:
            if isinstance(bound, Ge):
                low = float(bound.ge)  # type: ignore[arg-type]
            elif isinstance(bound, Gt):
                low, closed = float(bound.gt), False  # type: ignore[arg-type]
            elif isinstance(bound, Le):
                high = float(bound.le)  # type: ignore[arg-type]
            elif isinstance(bound, Lt):
                high, below = float(bound.lt), True  # type: ignore[arg-type]
        return low, high, closed, below

    def _whole_bounds(self) -> tuple[int | None, int | None]:
        low = next((bound.ge for bound in self.bounds if isinstance(bound, Ge)), None)
        high = next((bound.le for bound in self.bounds if isinstance(bound, Le)), None)
        return low, high  # type: ignore[return-value]

    def _schema_bounds(self, kind: Any) -> dict[str, Any]:
        if kind not in (int, float):
            return {}
        names = {Ge: "minimum", Gt: "exclusiveMinimum", Le: "maximum", Lt: "exclusiveMaximum"}
        return {
            names[type(bound)]: dataclasses.astuple(bound)[0]
            for bound in self.bounds
            if type(bound) in names
        }


_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string", "minLength": 1},
    Sequence[int]: {"type": "array", "items": {"type": "integer", "minimum": 0}},
    Sequence[str]: {"type": "array", "items": {"type": "string", "minLength": 1}},
}


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """Returns the options of a dataclass in the order of definition; none of another class."""
    found: Any = kind  # mypy does not count a type[Any] as hashable
    return _options_of(found)


@cache
def _options_of(kind: Any) -> tuple[Option, ...]:
    if not hasattr(kind, "__dataclass_fields__"):
        return ()
    hints, said = get_type_hints(kind, include_extras=True), docstrings(kind)
    found = []
    for one in dataclasses.fields(kind):
        hint, bounds = hints[one.name], ()
        if get_origin(hint) is Annotated:
            hint, *rest = get_args(hint)
            bounds = tuple(rest)
        help_ = one.metadata.get("help", said.get(one.name, ""))
        given = Option(one.name, _not_none(hint), bounds, _default(one), help_, is_needed(one))
        found.append(given)
    return tuple(found)


def read_options(given: Any, error: type[OutpaceError] = ParamsError) -> None:
    """Checks the options of a frozen dataclass in its ``__post_init__``, and puts what the engine
    works with in the place of what was given. None stays where it is the default."""
    for one in options_of(type(given)):
        value = getattr(given, one.name)
        if value is None and one.default is None:
            continue
        try:
            object.__setattr__(given, one.name, one.read(value, error))
        except OutpaceError as raised:
            raised.about(one.name)
            raise


def described(kind: type[Any]) -> Iterator[Option]:
    """Yields the options of a dataclass, those that are needed first, in the order of definition;
    none of a class that is no dataclass."""
    yield from sorted(options_of(kind), key=lambda one: not one.needed)


def docstrings(kind: type[Any]) -> Mapping[str, str]:
    """Returns what stands below the fields of a class, each in one line, by name: also of those
    that it inherits.

    >>> docstrings(Option)["help"]
    'What it does: its docstring, in one line.'
    """
    found: dict[str, str] = {}
    base: Any
    for base in reversed(kind.__mro__):
        if not hasattr(base, "__dataclass_fields__"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = tree.body  # type: ignore[attr-defined]
        for one, below in pairwise(body):
            match one, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _is_within(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or low <= value) and (high is None or value <= high)


def _default(one: dataclasses.Field[Any]) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return None if one.default is dataclasses.MISSING else one.default


def _not_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    rest = [part for part in get_args(hint) if part is not NoneType]
    return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007  # of a list


def _parts(kind: Any) -> tuple[list[str], list[Any]]:
    """Returns the words that a type allows, and the other types that it is made of."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return words, [part for part in parts if get_origin(part) is not Literal]
