"""Functions that a model may call: told to the chat template, read from the text.

Qwen and Hermes models write a call as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.strict_json import no_constant
from outpace.core.unicode import is_unicode
from outpace.serve.openai.errors import ApiError

BEGIN, END = "<tool_call>", "</tool_call>"

_BLANKS: Mapping[str, Any] = {"x-guidance": {"whitespace_pattern": r"[\x20]?"}}
"""Small models under a JSON grammar like to write blanks without end; the schema of a function's
arguments may say otherwise."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, with its arguments as a JSON text."""

    name: str
    arguments: str


class ToolParser:
    """Splits a text that comes in pieces into what is said and what is called.

    However the text is cut into pieces, the results, joined together, are the same. What looks like
    a call and is none counts as said.

    >>> parser = ToolParser()
    >>> parser.feed('Hm.<tool_'), parser.feed('call>{"name": "f", "arguments": {}}</tool_call>')
    (['Hm.'], [ToolCall(name='f', arguments='{}')])
    """

    def __init__(self) -> None:
        self._held = ""  # what may still become a call
        self._searched = 0  # characters of it that were searched for the end of a call
        self._called_last = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Returns what the text so far has become, beyond what was returned before."""
        self._held += text
        found: list[str | ToolCall] = []
        while True:
            begin = self._held.find(BEGIN)
            if begin < 0:
                safe = _safe(self._held)
                self._say(self._held[:safe], found)
                self._held = self._held[safe:]
                return found
            # A long call comes in many pieces: only what is new of it is looked at.
            end = self._held.find(END, max(begin, self._searched - len(END)))
            self._say(self._held[:begin], found)
            if end < 0:
                self._held = self._held[begin:]
                self._searched = len(self._held)
                return found
            self._close(self._held[begin + len(BEGIN) : end], END, found)
            self._held, self._searched = self._held[end + len(END) :], 0

    def finish(self) -> list[str | ToolCall]:
        """Returns what is left when the text has ended; a call that was not closed counts if it is
        whole."""
        found: list[str | ToolCall] = []
        held, self._held = self._held, ""
        if held.startswith(BEGIN):
            self._close(held[len(BEGIN) :], "", found)
        else:
            self._say(held, found)
        return found

    def _close(self, inside: str, end: str, found: list[str | ToolCall]) -> None:
        call = _read(inside)
        if call is None:
            self._called_last = False
            found.append(f"{BEGIN}{inside}{end}")
        else:
            self._called_last = True
            found.append(call)

    def _say(self, text: str, found: list[str | ToolCall]) -> None:
        if self._called_last:  # blanks behind a call only separate it from what follows
            text = text.lstrip()
        if text:
            self._called_last = False
            found.append(text)


def _safe(text: str) -> int:
    """Returns how many characters cannot be part of the beginning of a call."""
    for begin in range(max(0, len(text) - len(BEGIN) + 1), len(text)):
        if BEGIN.startswith(text[begin:]):
            return begin
    return len(text)


def _read(inside: str) -> ToolCall | None:
    """The call that a model wrote, None for what is none."""
    try:
        call = json.loads(inside, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not is_unicode(name):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    text = json.dumps(arguments, ensure_ascii=False)
    # Half of a surrogate pair cannot be sent: it stays as it can be written, as \\ud800.
    return ToolCall(name, text if is_unicode(text) else json.dumps(arguments))


def form_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the form that a text must have so that it calls what ``tool_choice`` demands; None
    where the model may choose. ``ApiError`` for a function that is not among the tools."""
    if choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        wanted = choice["function"]["name"]
        functions = [one for one in functions if one["name"] == wanted]
        if not functions:
            raise ApiError(400, f"tool_choice names {wanted!r}, which is no tool.", "tool_choice")
    return {"grammar": _grammar(functions)}


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the JSON schema of a function's arguments."""
    found: Mapping[str, Any] = function.get("parameters") or {"type": "object"}
    return found


def _grammar(functions: Sequence[Mapping[str, Any]]) -> str:
    """Returns the grammar, in Lark's notation, of one call of any of the functions.

    What begins and ends a call is one token where the vocabulary has it as one that is text, as in
    the calls that such a model writes by itself (`outpace.forms.spelling`).

    Each schema of arguments is a JSON document of its own there, as it was where the client wrote
    it: what it refers to inside itself, such as "#/$defs/City", is found from its own root.
    """
    numbers = range(len(functions))
    lines = [
        f'start: "{BEGIN}\\n" call "\\n{END}"',
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
