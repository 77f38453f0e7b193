"""Calls of functions, read from any text in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.serve.openai import tools
from outpace.serve.openai.tools import BEGIN, END, ToolCall, ToolParser

CALL = f'{BEGIN}\n{{"name": "weather", "arguments": {{"city": "Rome", "days": 2}}}}\n{END}'


def parsed(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolParser()
    found = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    text = "".join(part for part in found if isinstance(part, str))
    return text, [part for part in found if isinstance(part, ToolCall)]


def arguments_of(written: str) -> str:
    """Returns what is read of arguments that are written so, whole and letter by letter."""
    text = f'{BEGIN}{{"name": "f", "arguments": {written}}}{END}'
    assert parsed([text]) == parsed(list(text))
    said, (call,) = parsed([text])
    assert (said, call.name) == ("", "f")
    return call.arguments


def test_text_and_calls() -> None:
    text, calls = parsed([f"Let me see.\n{CALL}\n{CALL}\n"])
    assert text == "Let me see.\n"
    assert [call.name for call in calls] == ["weather"] * 2
    assert json.loads(calls[0].arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize(
    "text",
    [
        "a < b",
        f"{BEGIN}no json{END}",
        f'{BEGIN}{{"nom": 1}}{END}',
        f'{BEGIN}{{"name": 1}}{END}',
        f'{BEGIN}{{"name": "f" "arguments": {{}}}}{END}',
        f'{BEGIN}{{"name": "f", "arguments": {{"a": 1}}{END}',
        f'{BEGIN}{{"name": "f", "arguments": {{"a": 1]}}}}{END}',
        f'{BEGIN}{{"name": "f", "arguments": {{"a": "1}}}}{END}',
        f'{BEGIN}{{1: 2, "name": "f"}}{END}',
        f'{BEGIN}[{{"name": "f"}}]{END}',
        f'{BEGIN}"f"{END}',
        f"{BEGIN}{{",
        BEGIN,
        "<tool_call",
        "<",
        END,
    ],
)
def test_what_looks_like_a_call_and_is_none_is_said(text: str) -> None:
    assert parsed([text]) == (text, [])
    assert parsed(list(text)) == (text, [])
    broken, calls = parsed([f"{text}\n{CALL}"])
    assert (broken, len(calls)) == (f"{text}\n", 1)


@pytest.mark.parametrize("tag", [BEGIN, END, f"{END}{CALL}", "</", '\\"}}' + END, "\\\\" + END])
def test_an_argument_may_hold_the_text_of_a_tag(tag: str) -> None:
    arguments = {"content": tag, "then": [f"{tag}{tag}", {tag: None}]}
    assert arguments_of(json.dumps(arguments)) == json.dumps(arguments)


@pytest.mark.parametrize("length", range(len(END) + 1))
def test_a_call_counts_without_its_end_tag_and_with_a_part_of_it(length: int) -> None:
    cut = CALL.removesuffix(END) + END[:length]
    for pieces in ([cut], list(cut)):
        said, calls = parsed(pieces)
        assert (said, [call.name for call in calls]) == ("", ["weather"])


def test_a_call_is_known_at_the_end_of_its_object() -> None:
    parser = ToolParser()
    assert [len(parser.feed(letter)) for letter in CALL].index(1) == CALL.rindex("}")


@pytest.mark.parametrize("between", ["", "\n", "and then "])
def test_what_follows_a_call_without_its_end_tag_is_read_on(between: str) -> None:
    said, calls = parsed([CALL.removesuffix(END) + between + CALL + " done"])
    assert (said, len(calls)) == (f"{between.strip()}{' ' if between.strip() else ''}done", 2)


@pytest.mark.parametrize("surplus", ["}", "}}", "\n}\n"])
@pytest.mark.parametrize("tag", [END, ""])
def test_a_brace_too_many_after_a_call_is_not_said(surplus: str, tag: str) -> None:
    text = CALL.removesuffix(f"\n{END}") + surplus + tag
    for pieces in ([text], list(text)):
        said, calls = parsed(pieces)
        assert (said, [call.name for call in calls]) == ("", ["weather"])
    assert parsed([f"{text}\nDone {{}}."])[0] == "Done {}."
    assert [call.name for call in parsed([text + CALL])[1]] == ["weather"] * 2


@pytest.mark.parametrize(
    "written",
    [
        '{"x": 0.1000000000000000055511151231257827}',
        '{"x": 1.0, "y": 1E+2, "z": -0.0}',
        '{"x": 123456789012345678901234567890}',
        '{ "x" :\n[1,2 , 3]}',
        '{"x": "\\u00e9\\ud83d\\ude00 \u00e9", "x": 2}',
        "[1, 2]",
        '"Rome"',
        '"[1]"',
        '"{1}"',
        "7",
    ],
)
def test_arguments_are_handed_on_as_they_are_written(written: str) -> None:
    assert arguments_of(written) == written


@pytest.mark.parametrize(
    "inner",
    ['{"city": "Rome"}', '{"x": 0.1000000000000000055511151231257827}', '{"a": "</tool_call>"}'],
)
def test_an_object_in_a_string_is_taken_out_of_it(inner: str) -> None:
    assert arguments_of(json.dumps(inner)) == inner
    assert arguments_of(json.dumps(f"\n{inner} ")) == inner


@pytest.mark.parametrize("written", ["null", '""', "{}"])
def test_no_arguments_are_an_empty_object(written: str) -> None:
    assert arguments_of(written) == "{}"
    assert parsed([f'{BEGIN}{{"name": "f"}}'])[1] == [ToolCall("f", "{}")]
    other = f'{BEGIN}{{"name": "f", "parameters": {{"a": 1}}}}'
    assert parsed([other])[1] == [ToolCall("f", '{"a": 1}')]


@pytest.mark.parametrize("number", ["1e400", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_to_others_makes_no_call(number: str) -> None:
    text = f'{BEGIN}{{"name": "f", "arguments": {{"x": [{number}]}}}}{END}'
    assert parsed([text]) == parsed(list(text)) == (text, [])


def test_half_of_a_surrogate_pair_stays_as_it_can_be_sent() -> None:
    written = '{"a": "\\ud800", "b": "\u00e9"}'
    assert arguments_of(written) == arguments_of(json.dumps(written)) == written
    half = '"{\\"a\\": \\"\\ud800\\"}"'  # a string with the half itself
    assert arguments_of(half) == '{"a": "\\ud800"}'
    text = f'{BEGIN}{{"name": "\\ud800"}}{END}'
    assert parsed([text]) == (text, [])


def test_what_is_nested_too_deep_is_said() -> None:
    text = f'{BEGIN}{{"name": "f", "arguments": {"[" * 200_000}{"]" * 200_000}}}{END}'
    assert parsed([text]) == (text, [])


def test_each_character_of_a_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of many pieces is not searched anew with each of them."""
    looked: list[int] = []

    class Counted:
        def __init__(self, pattern: Any) -> None:
            self.pattern = pattern

        def search(self, text: str, at: int) -> Any:
            found = self.pattern.search(text, at)
            looked.append((found.end() if found else len(text)) - at)
            return found

    for name in ("_FIRST", "_OUTSIDE", "_IN_STRING"):
        monkeypatch.setattr(tools, name, Counted(getattr(tools, name)))
    long = f'{BEGIN}{{"name": "f", "arguments": {{"a": "{"word " * 2_000}", "b": [1, 2]}}}}'
    assert len(parsed(list(long))[1]) == 1
    assert sum(looked) <= len(long)


PARTS = [CALL, BEGIN, END, "<tool", "hm", "\n", '{"name": "f"}', "<", '"', "\\", "{", "}", '"a": "']


@given(st.lists(st.sampled_from(PARTS)), st.randoms(use_true_random=False))
def test_pieces_do_not_matter(parts: list[str], random: Any) -> None:
    text = "".join(parts)
    cuts = sorted(random.sample(range(len(text) + 1), min(len(text), 7)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == parsed([text]) == parsed(list(text))
