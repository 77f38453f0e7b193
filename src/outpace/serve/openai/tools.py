"""Functions that a model may call: its calls, found in a text that comes in pieces, and the grammar
of a call that a client demands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.strict_json import STRICT, members
from outpace.core.unicode import is_unicode
from outpace.forms.grammars import JSON_WHITESPACE, choices_in_lark
from outpace.forms.json_schemas import schema_text
from outpace.serve.openai.errors import ApiError

BEGIN, END = "<tool_call>", "</tool_call>"


# -- calls in a text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, with its arguments as a JSON text."""

    name: str
    arguments: str


class ToolParser:
    """Splits a text that comes in pieces into what is said and what is called.

    Qwen and Hermes models write a call as ``<tool_call>{"name": ..., "arguments": {...}}
    </tool_call>``. Where its JSON object ends is read from the object itself: an argument may hold
    the text of a tag, and models forget the end tag.

    However the text is cut into pieces, the results, joined together, are the same. What looks like
    a call and is none counts as said. A call counts from the end of its object on, with an end tag
    or without one.

    >>> parser = ToolParser()
    >>> parser.feed('Hm.<tool_'), parser.feed('call>{"name": "f", "arguments": {}}</tool_call>')
    (['Hm.'], [ToolCall(name='f', arguments='{}')])
    """

    def __init__(self) -> None:
        self._held = ""  # what may still become a call, or its end tag
        self._object: _OpenObject | None = None  # of the call with which the held text begins
        self._closing = False  # whether a call's end tag may follow
        self._called_last = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Returns what the text so far has become, beyond what was returned before."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._goes_on(found):
            pass
        return found

    def finish(self) -> list[str | ToolCall]:
        """Returns what is left when the text has ended. A call that has not come to the end of its
        object is said; what has come of a call's end tag is not."""
        found: list[str | ToolCall] = []
        while self._object is not None:
            self._give_up(found)
            found += self.feed("")
        if not self._closing:
            self._say(self._held, found)
        self._held, self._closing = "", False
        return found

    def _goes_on(self, found: list[str | ToolCall]) -> bool:
        """Takes the next part of the held text; returns whether there may be another."""
        if self._closing:
            return self._close()
        if self._object is None:
            return self._open(found)
        end = self._object.end_in(self._held)
        if end is None:
            return False
        call = None if end == NO_OBJECT else _read(self._held[len(BEGIN) : end])
        if call is None:
            self._give_up(found)
        else:
            found.append(call)
            self._held = self._held[end:]
            self._object, self._closing, self._called_last = None, True, True
        return True

    def _open(self, found: list[str | ToolCall]) -> bool:
        """Says what comes before the next call; returns whether one begins."""
        begin = self._held.find(BEGIN)
        safe = _safe(self._held) if begin < 0 else begin
        self._say(self._held[:safe], found)
        self._held = self._held[safe:]
        if begin < 0:
            return False
        self._object = _OpenObject(len(BEGIN))
        return True

    def _close(self) -> bool:
        """Takes the end tag of a call, and braces before it, of which small models write too many;
        returns whether it is known that the tag comes or does not."""
        rest = _SURPLUS.sub("", self._held, count=1)
        if END.startswith(rest) and rest != END:
            return False
        self._held = rest.removeprefix(END)
        self._closing = False
        return True

    def _give_up(self, found: list[str | ToolCall]) -> None:
        """Says the tag with which the held text begins. After it, another call may begin."""
        self._say(BEGIN, found)
        self._held, self._object = self._held[len(BEGIN) :], None

    def _say(self, text: str, found: list[str | ToolCall]) -> None:
        if self._called_last:  # blanks after a call only separate it from what follows
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


NO_OBJECT = -1
"""In the place of an object's end: there is no object."""


class _OpenObject:
    """Finds the end of a JSON object in a text that grows. Each character is looked at once.

    begin: where the object begins, blanks aside.
    """

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._depth = 0  # open brackets
        self._in_string = False

    def end_in(self, text: str) -> int | None:
        """Returns the object's end in the text so far: None where it has not come, `NO_OBJECT`
        where none can. What has an end may still be no JSON."""
        while True:
            marks = _IN_STRING if self._in_string else _OUTSIDE if self._depth else _FIRST
            found = marks.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            mark = found[0]
            if mark == "\\":
                if found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if mark == '"' and self._depth:
                self._in_string = not self._in_string
            elif mark == "{" or (mark == "[" and self._depth):
                self._depth += 1
            elif mark in "]}" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return self._at
            else:
                return NO_OBJECT


_FIRST = re.compile(r"[^ \t\r\n]")
"""What an object begins with."""
_OUTSIDE = re.compile(r'["{}\[\]<]')
"""What counts between the strings of an object. No JSON has "<" there: a tag comes too early."""
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
"""What counts in a string. A line break, as JSON has none there, shows that it lacks its end."""


def _read(text: str) -> ToolCall | None:
    """The call that a model wrote as an object, None for what is none."""
    try:
        found = {name: (value, written) for name, value, written in members(text)}
    except (ValueError, RecursionError):
        return None
    name, _ = found.get("name", (None, ""))
    if not isinstance(name, str) or not is_unicode(name):
        return None
    nothing = (None, "")
    arguments, written = found.get("arguments", found.get("parameters", nothing))
    return ToolCall(name, _as_object(arguments, written))


def _as_object(arguments: Any, written: str) -> str:
    """Returns the JSON text of a call's arguments, as the model wrote it: numbers keep their
    digits. An object that came as the text of a string is taken out of it."""
    if arguments is None or arguments == "":
        return "{}"
    if not isinstance(arguments, str):
        return written
    # Half of a surrogate pair cannot be sent: it stays as it can be written, as \ud800.
    inner = _SURROGATES.sub(lambda half: f"\\u{ord(half[0]):04x}", arguments.strip())
    try:
        return inner if isinstance(STRICT.decode(inner), dict) else written
    except (ValueError, RecursionError):
        return written


_SURPLUS = re.compile(r"\A[\s}]+")
_SURROGATES = re.compile("[\ud800-\udfff]")


# -- the grammar of a call -------------------------------------------------------------------------

_WHITESPACE: Mapping[str, Any] = {"x-guidance": {"whitespace_pattern": r"[\x20]?"}}
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
    return {"grammar": "\n".join(["start: one", *_call_rules(functions, special)])}


def form_or_calls(
    form: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], special: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the form of a text that either has a form or calls tools, one after another, where
    the model may choose. A grammar or a regular expression says itself where calls may stand.

    special: as for `form_of`. Raises ``ParamsError`` for what is no such form.
    """
    ((kind, value),) = form.items()
    if kind in ("grammar", "regex"):
        return dict(form)
    if kind == "choice":
        answer = f"answer: CHOICE\nCHOICE: {choices_in_lark(value)}"
    else:
        schema = json.loads(schema_text({"type": "object"} if kind == "json_object" else value))
        schema = {} if schema is True else schema
        if schema is not False:  # which allows nothing, and is refused
            schema = {"x-guidance": dict(JSON_WHITESPACE), **schema}
        answer = f"answer: %json {json.dumps(schema)}"
    start = 'start: answer | one ("\\n" one)*'
    functions = [tool["function"] for tool in tools]
    return {"grammar": "\n".join([start, answer, *_call_rules(functions, special)])}


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the JSON schema of a function's arguments, which are an object."""
    return {"type": "object", **(function.get("parameters") or {})}


def _call_rules(functions: Sequence[Mapping[str, Any]], special: Sequence[str]) -> list[str]:
    """Returns the rules, in Lark's notation, of ``one`` call of any of the functions.

    What begins and ends a call is one token where the vocabulary has one for it, as in the calls
    that such a model writes by itself: a special token is named, any other is found by its text
    (`outpace.forms.tokenizer`).

    Each schema of arguments is a JSON document of its own there, as it was where the client wrote
    it: what it refers to inside itself, such as "#/$defs/City", is found from its own root.
    """
    numbers = range(len(functions))
    begin = f'{BEGIN} "\\n"' if BEGIN in special else f'"{BEGIN}\\n"'
    end = f'"\\n" {END}' if END in special else f'"\\n{END}"'
    lines = [
        f"one: {begin} call {end}",
        "call: " + " | ".join(f"call_{number}" for number in numbers),
    ]
    for number, function in zip(numbers, functions, strict=True):
        schema = {**_WHITESPACE, **parameters_of(function)}
        said = ["{", '"name"', ":", json.dumps(function["name"], ensure_ascii=False), ","]
        said += ['"arguments"', ":"]
        before = "".join(f'{json.dumps(text)} " "? ' for text in said)
        lines.append(f'call_{number}: {before}arguments_{number} " "? "}}"')
        lines.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return lines
