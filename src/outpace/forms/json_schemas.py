"""JSON schemas: as texts, within what llguidance follows, and whether they are sound at all."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote

from outpace.core.values import shown
from outpace.errors import ConfigError, ParamsError

# -- room for work that goes down along what a client wrote ----------------------------------------

STACK = 512 << 20
"""Bytes of stack with which a grammar is compiled; what is not used takes no memory. llguidance
goes down along references, and a chain of thousands would end the process with the usual stack."""

LONGEST = 1 << 20
"""Characters of a form at most: this many fit into that stack, whatever they say."""

Made = TypeVar("Made")

_starting = threading.Lock()
"""The size of a new thread's stack is the process's."""


def with_deep_stack(work: Callable[[], Made]) -> Made:
    """Returns what a function makes, or raises its error, in a thread of its own."""
    done: Future[Made] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="outpace-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


# -- what demands nothing of a text, although llguidance refuses it --------------------------------

_IDLE: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Keywords that llguidance does not follow, and values with which there is nothing to follow."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas by names, which are no keywords."""

_VALUES = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are JSON of any kind."""


def without_annotations(text: str) -> str:
    """Returns a JSON schema without what it only remarks: formats that llguidance does not know,
    which JSON Schema calls annotations, and keywords with which nothing is demanded. Its patterns
    are written so that llguidance follows them."""
    if not any(f'"{name}"' in text for name in ("format", "pattern", *_IDLE)):
        return text
    schema = json.loads(text)
    for part in _parts(schema):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _without_zero(part["pattern"])
    for part in _parts(schema):
        name = part.get("format")
        if isinstance(name, str) and not (len(name) <= LONGEST_FORMAT and _is_known(name)):
            del part["format"]
    for part in _parts(schema):
        for name, values in _IDLE.items():
            if name in part and part[name] in values:
                del part[name]
    return json.dumps(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields each schema in a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in _BY_NAME and isinstance(value, dict):
                    waiting += value.values()
                elif name not in _VALUES:
                    waiting.append(value)
            yield part


def _without_zero(pattern: str) -> str:
    r"""Returns a pattern whose negated classes leave out the character of number zero.

    llguidance 1.9.1 lets a class of characters that holds all control characters spell them in
    JSON's way, and the quote and the backslash with them: `[^"]` allowed `\"`.

    >>> _without_zero(r'^[^"]*\[[a-z]$')
    '^[^\\x00"]*\\[[a-z]$'
    """
    found, at = [], 0
    while at < len(pattern):
        length = 2 if pattern[at] == "\\" or pattern.startswith("[^", at) else 1
        found.append(pattern[at : at + length])
        at += length
        if found[-1] == "[^" and not pattern.startswith("]", at):
            found.append(r"\x00")
    return "".join(found)


LONGEST_FORMAT = 64
"""Characters of a format's name, at most: a longer one is no name of any, and would be kept."""


@lru_cache(maxsize=256)
def _is_known(format: str) -> bool:
    """Whether llguidance follows a format."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "format": format})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


# -- whether schemas are sound ---------------------------------------------------------------------

LARGEST_MULTIPLE = 100_000
"""What all ``multipleOf`` of a JSON schema have as their least common multiple, at most: where
several are about one number, llguidance makes a state for each, in minutes and gigabytes."""

KEPT = 4096
"""Schemas that are known to be sound: clients send the same tools with each request."""

SOUND = ("not supported", "is not present in a registry", "Unimplemented keys")
"""With what llguidance refuses schemas that are sound, and that it cannot follow all the same:
patterns that look around, ``oneOf`` whose schemas overlap, references to other documents, ``not``,
``uniqueItems`` and the like."""


class SchemaChecker:
    """Finds what is wrong with JSON schemas that no text has to follow, in any thread.

    What llguidance cannot follow is no fault of theirs; each is looked at as a whole, and once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # the latest ones last

    def faults(self, schemas: Sequence[Any]) -> dict[int, str]:
        """Returns what is wrong with those of the schemas that are not sound, by their places;
        ``ConfigError`` where llguidance is not installed."""
        texts, found = {}, {}
        for place, schema in enumerate(schemas):
            try:
                text = json.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                found[place] = f"it is no JSON: {error}"
                continue
            if len(text) > LONGEST:
                found[place] = f"it has {len(text):,} characters, and {LONGEST:,} are the most"
                continue
            texts[place] = text
        new = {place: text for place, text in texts.items() if not self._is_known(text)}
        if new:
            told = with_deep_stack(lambda: {place: _fault(text) for place, text in new.items()})
            found |= {place: fault for place, fault in told.items() if fault}
            self._keep([new[place] for place, fault in told.items() if not fault])
        return found

    def _is_known(self, text: str) -> bool:
        key = _key(text)
        with self._lock:
            known = key in self._known
            if known:
                self._known.move_to_end(key)
        return known

    def _keep(self, texts: Sequence[str]) -> None:
        with self._lock:
            self._known.update((_key(text), None) for text in texts)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)


def schema_text(value: Any) -> str:
    """Returns a JSON schema, which may be given as a text, as a text; ``ParamsError`` for what is
    none, or would take too much to follow."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParamsError(f"json must be a JSON schema, and is no JSON ({error}).") from error
    if not isinstance(value, (Mapping, bool)):
        raise ParamsError(f"json must be a JSON schema: an object, not {shown(value)}.")
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParamsError(f"json must be a JSON schema, and is no JSON ({error}).") from error
    check_schema(value)
    return text


def check_schema(schema: Any) -> None:
    """Raises ``ParamsError`` for a JSON schema that no text could be made to follow, or only in
    minutes. schema: of JSON's own kinds."""
    check_multiples(schema)
    try:
        endless = _References(schema).endless()
    except RecursionError:  # so deep that llguidance says whether it can be followed
        return
    if endless is not None:
        raise ParamsError(
            f"json asks for {endless}, which always holds another one like itself, so that no text "
            "ever ends: let it be null, or left out, somewhere on the way."
        )


class _References:
    """Finds out what a schema refers to in itself that has no end, as a node of a list has none
    which must name the next node. Where it is not certain, there is one."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._end: dict[str, bool] = {"#": False}  # by reference: whether an end is known so far

    def endless(self) -> str | None:
        """Returns what has no end and each text would have to hold; None where there is none."""
        if self._has_names():
            return None
        for _ in range(_PASSES):
            before = dict(self._end)
            for reference in before:
                known = self._end[reference]
                self._end[reference] = known or self._ends(self._target(reference))
            if self._end["#"]:
                return None
            if before == self._end:
                last = [reference for reference, ends in before.items() if not ends][-1]
                return "an object" if last == "#" else shown(last)
        return None

    def _ends(self, part: Any) -> bool:
        """Whether a schema has a text that ends, as far as is known."""
        if not isinstance(part, Mapping):
            return True
        reference = part.get("$ref")
        if isinstance(reference, str) and not self._end.setdefault(reference, False):
            return False
        ways = [part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)]
        if not all(any(map(self._ends, some)) for some in ways if some):
            return False
        together = part.get("allOf")
        if isinstance(together, list) and not all(map(self._ends, together)):
            return False
        kinds = part.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        values = {"object": self._members, "array": self._items}
        if (
            not kinds
            or "enum" in part
            or "const" in part
            or not set(map(str, kinds)) <= set(values)
        ):
            return True
        return any(all(map(self._ends, values[kind](part))) for kind in kinds)

    @staticmethod
    def _members(part: Mapping[str, Any]) -> list[Any]:
        """What an object must hold."""
        required, known = part.get("required"), part.get("properties")
        names = required if isinstance(required, list) else []
        known = known if isinstance(known, Mapping) else {}
        return [known[name] for name in names if isinstance(name, str) and name in known]

    @staticmethod
    def _items(part: Mapping[str, Any]) -> list[Any]:
        """What an array must hold, each kind of item once."""
        least, first, rest = part.get("minItems"), part.get("prefixItems"), part.get("items")
        if not isinstance(least, (int, float)) or least < 1:
            return []
        first = first if isinstance(first, list) else rest if isinstance(rest, list) else []
        further = [rest] if isinstance(rest, Mapping) and least > len(first) else []
        return [*first[: int(least)], *further]

    def _target(self, reference: str) -> Any:
        """What a reference leads to; True where it leads out of the schema, or nowhere."""
        head, *names = reference.split("/")
        part = self._schema if head == "#" else True
        for name in names:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(part, Mapping) and key in part:
                part = part[key]
            elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            else:
                return True
        return part

    def _has_names(self) -> bool:
        """Whether parts of the schema have names of their own, from which references start."""
        waiting = list(self._schema.values()) if isinstance(self._schema, Mapping) else []
        while waiting:
            part = waiting.pop()
            if isinstance(part, Mapping):
                if "$id" in part:
                    return True
                waiting += part.values()
            elif isinstance(part, (list, tuple)):
                waiting += part
        return False


_PASSES = 50
"""How often a schema is gone through: references rarely lead over more than a few others."""


def check_multiples(schema: Any) -> None:
    """Raises ``ParamsError`` for numbers that have to be multiples of too many others, or of a
    large one. schema: of JSON's own kinds."""
    scale, common = 1, 0  # the least common multiple so far is common / scale; 0: of none
    for of in _multiples(schema):
        wider = math.lcm(scale, of.denominator)
        this = int(of * wider)
        common = math.lcm(common * (wider // scale), this) if common else this
        scale = wider
        if common > LARGEST_MULTIPLE:  # at once: a megabyte of numbers would take minutes
            raise ParamsError(
                "json has multipleOf, the numbers of which have a least common multiple above "
                f"{LARGEST_MULTIPLE:,}: leave it out, and look at the number yourself."
            )


def _multiples(schema: Any) -> Iterator[Fraction]:
    """Yields the numbers above 0 that anything in a schema has to be a multiple of."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            of = part.get("multipleOf")
            if isinstance(of, (int, float)) and not isinstance(of, bool) and 0 < of < math.inf:
                yield Fraction(str(of))
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part


def is_sound(problem: str) -> bool:
    """Returns whether what llguidance refuses is sound all the same."""
    return any(words in problem for words in SOUND)


def refusal(problem: str) -> str:
    """Returns what is wrong with a form that llguidance refuses, and what to do."""
    if not is_sound(problem):
        return f"cannot be made a grammar ({reason_in(problem)}): correct it"
    reason = reason_in(problem.partition(". Enable 'coerce_one_of'")[0])
    other = ", or write anyOf" if reason.startswith("oneOf") else ""
    return f"holds what no grammar follows ({reason}): leave it out{other}"


def reason_in(problem: str) -> str:
    """Returns what llguidance says of a grammar, in one line that is not too long."""
    return " ".join(problem.split())[:300]


def _fault(text: str) -> str:
    """Returns what is wrong with a schema, nothing for one that is sound."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ConfigError(
            "the schemas of tools are checked by llguidance: pip install 'outpace[serve]'."
        ) from error
    try:
        source = LLMatcher.grammar_from_json_schema(text, {"lenient": True})
        problem = LLMatcher.validate_grammar(source)
    except Exception as error:  # of a library whose exceptions are not documented
        problem = str(error) or type(error).__name__
    return "" if problem.startswith("WARNING") or is_sound(problem) else reason_in(problem)


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
