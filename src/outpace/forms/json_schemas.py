"""JSON schemas: as texts, within what llguidance follows, and whether they are sound at all."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from outpace.core.values import shown
from outpace.errors import ConfigError, ParamsError
from outpace.forms.deep_stack import LONGEST, with_deep_stack

LARGEST_MULTIPLE = 100_000
"""What all ``multipleOf`` of a JSON schema have as their least common multiple, at most: where
several are about one number, llguidance makes a state for each, in minutes and gigabytes."""

KEPT = 4096
"""Schemas that are known to be sound: clients send the same tools with each request."""

SOUND = ("not supported", "is not present in a registry", "Unimplemented keys")
"""With what llguidance refuses schemas that are sound, and that it cannot follow all the same:
patterns that look around, ``oneOf`` whose schemas overlap, references to other documents, ``not``,
``uniqueItems`` and the like."""


class SoundSchemas:
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
    check_multiples(value)
    return text


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
    """Returns what a client is told of a form, and to do, that llguidance refuses."""
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
