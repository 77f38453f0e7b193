"""Values as callers give them, read into plain Python: numbers, whole numbers, token ids, flags.

Each reader takes the option's name, for the error message, and returns the value as ``int``,
``float``, ``bool`` or a tuple of them. numpy's and torch's numbers are taken like Python's own:
further on they would overflow or compare otherwise. ``error`` is the class of what is raised.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.unicode import check_unicode
from outpace.errors import ConfigError, OutpaceError, ParamsError

_LONGEST_SHOWN = 80


def shown(value: object) -> str:
    """Returns a value's ``repr``, cut to one short line, for an error message.

    >>> shown([1, "a"])
    "[1, 'a']"
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a caller's own class, or a whole number of thousands of digits
        return f"a value of type {type(value).__name__}"
    if " at 0x" in text:  # an address tells a reader nothing
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def plain(value: Any) -> Any:
    """Returns arrays and tensors as (nested) lists, their scalars as Python's, the rest as it is.

    >>> plain(np.int64(7)), plain(np.array([1, 2])), plain("text")
    (7, [1, 2], 'text')
    """
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def plain_entries(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options by name, those that are a scalar of numpy as Python's.

    >>> plain_entries({"count": np.int64(7), "name": "text"})
    {'count': 7, 'name': 'text'}
    """
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in given.items()
    }


def is_integer(value: Any) -> bool:
    """Returns whether this is a whole number; True and False are not.

    >>> is_integer(np.int64(7)), is_integer(7.0), is_integer(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def integer(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    *,
    error: type[OutpaceError] = ParamsError,
) -> int:
    """Returns a whole number with least <= value <= most, either bound open where it is None."""
    if not is_integer(value):
        raise error(f"{name} must be a whole number, not {shown(value)}.").about(name)
    number = int(value)
    if least is not None and number < least:
        raise error(f"{name} must be at least {least}, not {shown(number)}.").about(name)
    if most is not None and number > most:
        raise error(f"{name} must be at most {most}, not {shown(number)}.").about(name)
    return number


def number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    closed: bool,
    below: bool = False,
    error: type[OutpaceError] = ParamsError,
) -> float:
    """Returns a finite number with low <= value <= high, or low < value where not ``closed``.

    below: whether it must be smaller than ``high``, too.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # a whole number beyond the floating-point ones
            found = math.inf  # either sign is out of range
        above_low = low <= found if closed else low < found
        under_high = found < high if below else found <= high
        if above_low and under_high and math.isfinite(found):
            return found
    wanted = interval(low, high, closed, below)
    raise error(f"{name} must be {wanted}, not {shown(value)}.").about(name)


def interval(low: float, high: float, closed: bool, below: bool) -> str:
    """Returns what `number` takes, in words.

    >>> interval(0, 1, closed=False, below=False)
    'a number in (0, 1]'
    """
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    begin = "[" if closed and math.isfinite(low) else "("
    end = ")" if below or math.isinf(high) else "]"
    return f"a number in {begin}{low:g}, {high:g}{end}"


def flag(name: str, value: Any, *, error: type[OutpaceError] = ParamsError) -> bool:
    """Returns True or False; anything else is refused, also "no", which Python counts as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(f"{name} must be True or False, not {shown(value)}.").about(name)
    return bool(value)


def items(
    name: str, value: Any, what: str, error: type[OutpaceError] = ParamsError
) -> tuple[Any, ...]:
    """Returns the items of a list, tuple, set, array or tensor; () for None.

    Texts, bytes and mappings are refused: they can be iterated over, but nobody means that.
    """
    if value is None:
        return ()
    value = plain(value)
    if isinstance(value, (str, bytes, bytearray, memoryview, dict)) or not isinstance(
        value, Iterable
    ):
        raise error(f"{name} must be a list of {what}, not {shown(value)}.").about(name)
    return tuple(value)


def token_ids(name: str, value: Any, error: type[OutpaceError] = ParamsError) -> tuple[int, ...]:
    """Returns token ids: whole numbers from 0 up."""
    return tuple(_token(name, token, error) for token in items(name, value, "token ids", error))


def _token(name: str, value: Any, error: type[OutpaceError]) -> int:
    if type(value) is int and value >= 0:  # the common case, of which there may be thousands
        return value
    token = plain(value)
    if not is_integer(token) or token < 0:
        raise error(f"{name} must hold token ids (0 or positive), not {shown(value)}.")
    return int(token)


def texts(name: str, value: Any, error: type[OutpaceError] = ParamsError) -> tuple[str, ...]:
    """Returns non-empty strings that can be encoded."""
    found = items(name, value, "non-empty strings", error)
    for text in found:
        if not isinstance(text, str) or not text:
            raise error(f"{name} must be a list of non-empty strings, not {shown(value)}.")
        check_unicode(name, text, error=error)
    return found


def folder(name: str, value: Any) -> Path:
    """Returns the path of a folder; ``ConfigError`` for what is no path."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{name} must be the path of a folder, not {shown(value)}.")
    return Path(path)
