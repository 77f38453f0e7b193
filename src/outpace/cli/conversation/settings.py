"""The sampling options of a conversation, which ``/set`` and ``/speculate`` change."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from outpace.cli.flags.groups import SAMPLING, STOPPING
from outpace.core.options import options_of
from outpace.core.params import SamplingParams
from outpace.errors import ParamsError, did_you_mean

NAMES = (*(name for name in SAMPLING if name != "logit_bias"), "seed", *STOPPING[:3])
"""The options that ``/set`` changes."""

UNSET = ("none", "unset", "default")
"""Values that take an option back to what it is without a flag."""


def changed(params: SamplingParams, text: str) -> SamplingParams:
    """Returns the params with the options of ``temperature 0.7 top_p 0.9`` (or ``name=value``).

    Raises ``ParamsError`` for an unknown name or a value that is none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ParamsError(f"/set {text}: {str(error).lower()}.") from error
    words = [part for word in words for part in _name_and_value(word)]
    if len(words) % 2:
        raise ParamsError(f"/set needs a value for {words[-1]!r}: /set {words[-1]} VALUE.")
    pairs = zip(words[::2], words[1::2], strict=True)
    return dataclasses.replace(params, **{name: _value(name, value) for name, value in pairs})


def shown(params: SamplingParams) -> str:
    """Returns ``name value`` of each option, as ``/set`` without arguments shows them."""
    return "\n".join(f"{name} {_shown(getattr(params, name))}" for name in NAMES)


def speculative(text: str) -> Any:
    """Returns what ``SamplingParams.speculative`` is for ``on``, ``off``, ``auto`` or a number."""
    known: Mapping[str, Any] = {"on": None, "off": "off", "auto": "auto"}
    if text in known:
        return known[text]
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ParamsError(f"/speculate takes on, off, auto or a number of tokens, not {text!r}.")


def _name_and_value(word: str) -> list[str]:
    name, sign, value = word.partition("=")
    return [name, value] if sign and name in NAMES else [word]


def _value(name: str, text: str) -> Any:
    if name not in NAMES:
        raise ParamsError(f"/set does not know {name!r}{did_you_mean(name, NAMES)}.")
    option = next(one for one in options_of(SamplingParams) if one.name == name)
    if text in UNSET:
        return option.default
    if option.kind not in (int, float):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ParamsError(f"{name} takes a number, or {UNSET[0]}, not {text!r}.")


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
