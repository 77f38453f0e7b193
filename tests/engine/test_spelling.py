"""Texts of a given form where the vocabulary has added tokens: what is text there, what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from outpace.core.special_tokens import SpecialTokenFilter, special_tokens
from outpace.errors import ParamsError
from outpace.forms.grammars import Grammars
from outpace.serve.openai.tools import ToolCall, ToolParser, form_of

from .texts import END, SIZE, tokenizer

CALL, CLOSE, SPECIAL = SIZE, SIZE + 1, SIZE + 2
WIDTH = SIZE + 5  # the last two tokens have no text


def extended(special_calls: bool = False) -> Any:
    """Returns the tokenizer of bytes with tokens that were added to it, as Qwen's has them."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer().backend_tokenizer.to_str()),
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    calls = [AddedToken(text, special=special_calls) for text in ("<tool_call>", "</tool_call>")]
    made.add_tokens([*calls, AddedToken("<|fim|>", special=True)])
    return made


def followed(made: Any, kind: str, value: Any) -> tuple[list[int], str]:
    """Returns the tokens of a text and the text, where the last of all tokens that may come next is
    taken: an added one wherever it may be."""
    mask = Grammars(made, WIDTH, [END]).compile(kind, value).copy()
    ids: list[int] = []
    while True:
        allowed = mask.allowed(ids, [[]])[0].nonzero()[:, 0].tolist()
        assert allowed, f"nothing may follow {made.decode(ids)!r}"
        if END in allowed:
            return ids, str(made.decode(ids, skip_special_tokens=True))
        ids.append(allowed[-1])


@pytest.mark.parametrize("text", ["<end>", "<|fim|>", "<tool_call>", "a<end>b<|fim|></tool_call>"])
@pytest.mark.parametrize("kind", ["choice", "regex", "json"])
def test_what_a_form_says_in_words_is_in_the_text(text: str, kind: str) -> None:
    form: Any = {"choice": [text], "regex": text.replace("|", r"\|"), "json": {"const": text}}[kind]
    ids, found = followed(extended(), kind, form)
    assert found == (f'"{text}"' if kind == "json" else text)
    assert not {END, SPECIAL} & set(ids)


def test_an_added_token_that_is_text_may_be_written_and_may_be_spelt() -> None:
    mask = Grammars(extended(), WIDTH, [END]).compile("choice", ["<tool_call>", "<end>"]).copy()
    begins = [tokenizer()("<").input_ids[0], CALL]
    assert mask.allowed([], [[]])[0].nonzero()[:, 0].tolist() == begins
    spelt = tokenizer()("<tool_call>", split_special_tokens=True).input_ids
    assert mask.allowed(spelt, [[]])[0].nonzero()[:, 0].tolist() == [END]


def test_a_grammar_names_added_tokens_of_both_kinds() -> None:
    grammar = 'start: <tool_call> /</ "<|fim|>" <|fim|> <[258]> # <tool_call>'
    ids, text = followed(extended(), "grammar", grammar)
    assert text == "<tool_call><<|fim|></tool_call>"
    assert (ids[0], ids[-2:]) == (CALL, [SPECIAL, CLOSE])


@pytest.mark.parametrize("special", [False, True])
def test_a_demanded_call_can_be_written_and_read(special: bool) -> None:
    """By the tokens that begin and end one, also where texts leave them out by themselves."""
    schema = {"properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**schema, "additionalProperties": False}}
    made, tags = extended(special), ("<tool_call>", "</tool_call>") if special else ()
    form = form_of("required", [{"type": "function", "function": function}], tags)
    assert form is not None
    ids, text = followed(made, "grammar", form["grammar"])
    assert (CALL in ids, CLOSE in ids) == (True, True)
    hidden = {token for token, word in special_tokens(made).items() if word not in tags}
    text = SpecialTokenFilter(made, hidden).decode(ids, skip_special_tokens=True)
    (call,) = ToolParser().feed(text)
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", r"[^\s\S]"), ("grammar", r"start: /[^\s\S]/ | /[^\s\S]a/")]
)
def test_a_form_that_no_text_has_is_refused_by_name(kind: str, value: str) -> None:
    with pytest.raises(ParamsError, match=f"{kind} allows no text"):
        Grammars(tokenizer(), SIZE, [END]).compile(kind, value)
