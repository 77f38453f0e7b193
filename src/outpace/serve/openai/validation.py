"""Checks a body against a JSON schema: the few keywords that our schemas use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from outpace.core.unicode import check_unicode
from outpace.core.values import shown
from outpace.errors import did_you_mean
from outpace.serve.openai.errors import ApiError
from outpace.serve.openai.schemas import NOT_OFFERED

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_NAMES = {"integer": "a whole number", "number": "a number", "string": "a text", "null": "null"}
_NAMES |= {"boolean": "true or false", "array": "a list", "object": "an object"}

NEAR = 0.8
"""How much alike an unknown field and a known one have to be for a slip of the keys: clients send
fields of other servers, too, of which none here is meant."""


class _WrongKind(ApiError):
    """A value of another kind than the schema's: each of several choices names its own."""

    def __init__(self, path: str, wanted: list[str], value: Any) -> None:
        named = " or ".join(dict.fromkeys(wanted))
        super().__init__(400, f"{path or 'the body'} must be {named}, not {shown(value)}.", path)
        self.wanted, self.value = wanted, value


def check(value: Any, schema: Mapping[str, Any], path: str = "") -> None:
    """Raises ``ApiError`` (400) for a value that the schema does not allow. path: of the value.

    Fields that are null count as not given.
    """
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], path)
        return
    _check_kind(value, schema, path)
    if "enum" in schema and value not in schema["enum"]:
        if schema.get("description") == NOT_OFFERED:
            raise ApiError(400, f"{path} is not offered by this server: leave it out.", path)
        known = " or ".join(repr(one) for one in schema["enum"])
        raise ApiError(400, f"{path} must be {known}, not {shown(value)}.", path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(value, schema, path)
    if isinstance(value, str):
        _check_text(value, schema, path)
    if isinstance(value, list):
        _check_items(value, schema, path)
    if isinstance(value, dict):
        _check_fields(value, schema, path)


def _check_any(value: Any, choices: list[Mapping[str, Any]], path: str) -> None:
    """Checks against the choices of the value's own kind, for the sake of their message."""
    fitting = [choice for choice in choices if _is(value, choice)]
    errors = []
    for choice in fitting:
        try:
            return check(value, choice, path)
        except ApiError as error:
            errors.append(error)
    if fitting and "enum" not in fitting[-1]:
        raise _best(errors)
    words = [repr(word) for choice in choices for word in choice.get("enum", ())]
    others = [choice for choice in choices if "enum" not in choice]
    kinds = dict.fromkeys(words + [_NAMES[kind] for one in others for kind in _types(one)])
    raise ApiError(400, f"{path} must be {' or '.join(kinds)}, not {shown(value)}.", path)


def _best(errors: list[ApiError]) -> ApiError:
    """Returns what to say of several kinds of lists, of which none was given: the one that goes
    well the longest was meant."""
    most = max(map(_place, errors))
    best = [error for error in errors if _place(error) == most]
    kinds = [error for error in best if isinstance(error, _WrongKind)]
    if len(kinds) < len(best):
        return next(error for error in reversed(best) if error not in kinds)
    wanted = [name for error in kinds for name in error.wanted]
    return _WrongKind(kinds[0].param or "", wanted, kinds[0].value)


def _place(error: ApiError) -> list[int]:
    """In which items of lists the value is that an error is about, by the numbers in its path."""
    return [int(number) for number in re.findall(r"\[(\d+)\]", error.param or "")]


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = _types(schema)
    if isinstance(value, bool):  # Python counts it as a number
        return not kinds or "boolean" in kinds
    return not kinds or any(isinstance(value, _KINDS[kind]) for kind in kinds)


def _check_kind(value: Any, schema: Mapping[str, Any], path: str) -> None:
    if not _is(value, schema):
        kinds = [_NAMES[kind] for kind in _types(schema) if kind != "null"]
        raise _WrongKind(path, [schema["title"]] if "title" in schema else kinds, value)


def _check_range(value: float, schema: Mapping[str, Any], path: str) -> None:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above = schema.get("exclusiveMinimum", -math.inf)
    if low <= value <= high and above < value:
        return
    named = f"{schema['title']}, " if "title" in schema else ""
    if math.isinf(high):
        bounds = f"at least {low}" if math.isinf(above) else f"above {above}"
    else:
        bounds = f"in [{low}, {high}]" if math.isinf(above) else f"in ({above}, {high}]"
    raise ApiError(400, f"{path} must be {named}{bounds}, not {shown(value)}.", path)


def _check_text(value: str, schema: Mapping[str, Any], path: str) -> None:
    if len(value) < schema.get("minLength", 0):
        raise ApiError(400, f"{path} must not be empty.", path)
    if len(value) > schema.get("maxLength", len(value)):
        raise ApiError(400, f"{path} must have at most {schema['maxLength']} characters.", path)
    check_unicode(path, value, error=lambda sentence: ApiError(400, sentence, path))


def _check_items(value: list[Any], schema: Mapping[str, Any], path: str) -> None:
    if len(value) < schema.get("minItems", 0):
        raise ApiError(400, f"{path} must not be empty.", path)
    if len(value) > schema.get("maxItems", len(value)):
        raise ApiError(400, f"{path} must have at most {schema['maxItems']} items.", path)
    if "items" in schema:
        for index, item in enumerate(value):
            check(item, schema["items"], f"{path}[{index}]")


def _check_fields(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
    if len(value) > schema.get("maxProperties", len(value)):
        raise ApiError(400, f"{path} must have at most {schema['maxProperties']} entries.", path)
    inside = f"{path}." if path else ""
    known: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if value.get(name) is None:
            raise ApiError(400, f"{inside}{name} is missing.", f"{inside}{name}")
    for name, item in value.items():
        if item is None:  # clients send back what they were sent, with all that it lacks
            continue
        if name in known:
            check(item, known[name], f"{inside}{name}")
        elif schema.get("additionalProperties", True) is False:
            hint = did_you_mean(name, known, NEAR) if len(name) < 80 else "."
            hint = hint if "did you mean" in hint else ": leave it out"
            named = inside + shown(name[:70])[1:-1]  # as Python writes it: an answer is Unicode
            raise ApiError(
                400,
                f"{named} is nothing that this server knows{hint}.",
                named,
                "unknown_parameter",
            )
