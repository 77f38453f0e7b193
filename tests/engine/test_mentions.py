"""A grammar that names the tokens that end a text: kept to, or refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outpace.errors import ParamsError
from outpace.forms.grammars import Grammars
from outpace.forms.tokenizer import with_token_numbers

from .test_spelling import SPECIAL, WIDTH, extended, followed
from .texts import END, text_decoder, tokenizer

ENDS = {"<end>": 7, "<eot>": 8}


@pytest.mark.parametrize(
    ("grammar", "same"),
    [
        ('start: "a" <end>', 'start: "a" ""'),
        ('start: <end>', 'start: ""'),
        ('start: "a" <[7]>\n', 'start: "a" ""\n'),
        ('start: "a" <[7-8]>', 'start: "a" ""'),
        ('start: "a" <[8,7]> // then nothing', 'start: "a" "" // then nothing'),
        ('start: "a" <eot>? # and\nx: "b"', 'start: "a" ""? # and\nx: "b"'),
        ('?start[max_tokens=5]: "a" <end>\n  | x <eot>\nx: "b"',
         '?start[max_tokens=5]: "a" ""\n  | x ""\nx: "b"'),
        ('start: ("a" | "b") <end>\n%ignore / /', 'start: ("a" | "b") ""\n%ignore / /'),
        ('start: "<end>" /<end>/ x\nx: "b" // <end>', 'start: "<end>" /<end>/ x\nx: "b" // <end>'),
        ("start: <call> <fim> <[*]> <[^7]> <[5-7]>", "start: <[9]> <fim> <[*]> <[^7]> <[5-7]>"),
    ],
)  # fmt: skip
def test_an_end_behind_everything_is_left_to_the_text(grammar: str, same: str) -> None:
    assert with_token_numbers(grammar, {"<call>": 9}, ENDS) == same


@pytest.mark.parametrize("part", ['\\"', "/\\", '"\\', "\n/a", '\na[\\"', "\na[", "<", "\n ?!a.1"])
def test_hundreds_of_thousands_of_marks_are_looked_at_once(part: str) -> None:
    grammar = '"' + part * (300_000 // len(part))
    for text in (grammar, grammar[1:], f'start: "a" <call>\n{grammar}\\\n'):
        begin = time.process_time()
        with_token_numbers(text, {"<call>": 9}, ENDS)
        assert time.process_time() - begin < 10  # looked at from each mark: many minutes


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" {} "b"',
        'start: {} "b" | "c"',
        'start: "a" {}? "b"',
        'start: "a" {}+',
        'start: "a" {}~2',
        'start: "a" {} <end>',
        'start: "a" ({} | "c") "b"',
        'start: x "b"\nx: "a" {}',
        'start: "a" | "b" start "c" | {}',
        'start: %lark {{\nstart: {}\n}} "b"',
        'start: "a" {} %json {{"type": "null"}}',
        'start: "a" {}\n "b"',
    ],
)
@pytest.mark.parametrize("name", ["<end>", "<[8]>", "<[7-8]>"])
def test_an_end_before_something_is_refused(grammar: str, name: str) -> None:
    with pytest.raises(ParamsError) as refused:
        with_token_numbers(grammar.format(name), {}, ENDS)
    assert str(refused.value).startswith(f"grammar names {name}, which ends the text, elsewhere")
    assert "leave it out" in str(refused.value)


@pytest.mark.parametrize("name", ["<end>", f"<[{END}]>"])
def test_a_text_with_its_end_in_the_grammar(name: str) -> None:
    llm = text_decoder(verify="coupled")
    with pytest.raises(ParamsError, match="grammar names"):
        llm.requests("go:", {"structured_outputs": {"grammar": f'start: "a" {name} "b"'}})
    (request,) = llm.requests("go:", {"structured_outputs": {"grammar": f'start: "a" {name}'}})
    llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert (request.text, request.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("anything", ["<[*]>", f"<[0-{END}]>", f"<[^0-{END - 1}]>"])
@pytest.mark.parametrize("ends", [[END], [END, SPECIAL]])
def test_any_token_inside_of_a_text_is_none_that_ends_it(anything: str, ends: list[int]) -> None:
    made = extended()
    mask = Grammars(made, WIDTH, ends).compile("grammar", f'start: "a" {anything} "b"').copy()
    letters = tokenizer()("ab").input_ids
    inside = mask.allowed(letters[:1], [[]])[0].nonzero()[:, 0].tolist()
    assert inside
    assert not set(ends) & set(inside)
    behind = mask.allowed([letters[0], inside[-1], letters[1]], [[]])[0].nonzero()[:, 0].tolist()
    assert behind == ends


def test_other_special_tokens_may_be_named_anywhere() -> None:
    made: Any = extended()
    ids, text = followed(made, "grammar", 'start: "a" <|fim|> "b" <end>')
    assert SPECIAL in ids
    assert text == "ab"
