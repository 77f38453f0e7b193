"""Functions that a model may call, and the grammar of a call that a client demands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.serve.openai.errors import ApiError
from outpace.serve.openai.tool_parser import BEGIN, END

_BLANKS: Mapping[str, Any] = {"x-guidance": {"whitespace_pattern": r"[\x20]?"}}
"""Small models under a JSON grammar like to write blanks without end; the schema of a function's
arguments may say otherwise."""


def form_of(
    choice: Any, tools: Sequence[Mapping[str, Any]], special: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Returns the form that a text must have so that it calls what ``tool_choice`` demands; None
    where the model may choose. ``ApiError`` for a function that is not among the tools.

    special: those of `BEGIN` and `END` that are special tokens of the model.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        wanted = choice["function"]["name"]
        functions = [one for one in functions if one["name"] == wanted]
        if not functions:
            raise ApiError(400, f"tool_choice names {wanted!r}, which is no tool.", "tool_choice")
    return {"grammar": _grammar(functions, special)}


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the JSON schema of a function's arguments."""
    found: Mapping[str, Any] = function.get("parameters") or {"type": "object"}
    return found


def _grammar(functions: Sequence[Mapping[str, Any]], special: Sequence[str]) -> str:
    """Returns the grammar, in Lark's notation, of one call of any of the functions.

    What begins and ends a call is one token where the vocabulary has one for it, as in the calls
    that such a model writes by itself: a special token is named, any other is found by its text
    (`outpace.forms.spelling`).

    Each schema of arguments is a JSON document of its own there, as it was where the client wrote
    it: what it refers to inside itself, such as "#/$defs/City", is found from its own root.
    """
    numbers = range(len(functions))
    begin = f'{BEGIN} "\\n"' if BEGIN in special else f'"{BEGIN}\\n"'
    end = f'"\\n" {END}' if END in special else f'"\\n{END}"'
    lines = [
        f"start: {begin} call {end}",
        "call: " + " | ".join(f"call_{number}" for number in numbers),
    ]
    for number, function in zip(numbers, functions, strict=True):
        schema = {**_BLANKS, **parameters_of(function)}
        said = ["{", '"name"', ":", json.dumps(function["name"], ensure_ascii=False), ","]
        said += ['"arguments"', ":"]
        before = "".join(f'{json.dumps(text)} " "? ' for text in said)
        lines.append(f'call_{number}: {before}arguments_{number} " "? "}}"')
        lines.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(lines)
