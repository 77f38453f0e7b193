"""JSON as its standard has it: Python reads more, and makes infinity of what is large."""

from __future__ import annotations

import json
import math
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
