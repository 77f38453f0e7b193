"""JSON as its standard has it: Python reads more, and makes infinity of what is large."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any


def no_constant(name: str) -> Any:
    """Refuses NaN and Infinity, which Python reads and JSON does not know: a ``ValueError``."""
    raise ValueError(f"{name} is no number in JSON")


def finite(text: str) -> float:
    """Returns a number; ``ValueError`` for one that is too large for a float, as 1e400 is: written
    again it would be ``Infinity``."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is larger than any number that a program can hold")
    return number


STRICT = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)
"""Reads JSON alone, and only numbers that can be written again."""

_BLANKS = re.compile(r"[ \t\r\n]*")


def members(text: str, decoder: json.JSONDecoder = STRICT) -> Iterator[tuple[str, Any, str]]:
    """Yields of each member of a JSON object its name, its value, and how that is written.

    Raises ``ValueError`` or ``RecursionError`` where the text is no object.

    >>> list(members('{"a": 1e3, "b": {} }'))
    [('a', 1000.0, '1e3'), ('b', {}, '{}')]
    """
    at = _after(text, 0, "{")
    more = not text.startswith("}", at)
    while more:
        name, at = decoder.raw_decode(text, at)
        if not isinstance(name, str):
            raise ValueError("a member has no name")
        begin = _after(text, at, ":")
        value, at = decoder.raw_decode(text, begin)
        yield name, value, text[begin:at]
        at = _after(text, at)
        more = not text.startswith("}", at)
        if more:
            at = _after(text, at, ",")
    if _after(text, at, "}") < len(text):
        raise ValueError("something follows the object")


def _after(text: str, at: int, mark: str = "") -> int:
    """Returns where a text goes on after a mark, and the blanks before and after it."""
    at = _past_blanks(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} is missing")
    return _past_blanks(text, at + len(mark))


def _past_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()
