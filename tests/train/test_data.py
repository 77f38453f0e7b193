"""Training text from files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from outpace.errors import PromptError
from outpace.train.data import (
    Document,
    PromptAnswer,
    blocks,
    cut_answers,
    documents,
    frequent,
    items,
)


class Tokens:
    """One token for each character, and 99 at the end of a document."""

    bos_token_id = None
    eos_token_id = 99
    chat_template: str | None = None
    begins = False
    """Whether a special token, 50, is put before each text."""

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        first = [50] if add_special_tokens and self.begins else []
        return SimpleNamespace(input_ids=[*first, *(ord(letter) - ord("a") for letter in text)])


def read(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [found.text for found in documents([path], Tokens(), "a model")]


def test_documents_of_text_files_and_of_json_lines(tmp_path: Path) -> None:
    assert read(tmp_path / "a.txt", "one\n<|endoftext|>\ntwo") == ["one", "two"]
    several = (
        "<|endoftext|>\none\n\n<|endoftext|>\n<|endoftext|>\n two <|endoftext|>\n<|endoftext|>"
    )
    assert read(tmp_path / "a.txt", several) == ["one\n", " two <|endoftext|>"]
    (tmp_path / "a.txt").write_bytes(b"one\r\nmore\r\n<|endoftext|>\r\ntwo\r\n")
    found = [each.text for each in documents([tmp_path / "a.txt"], Tokens(), "a model")]
    assert found == ["one\r\nmore", "two\r\n"]
    lines = [
        {"text": "plain"},
        {"prompt": "ask", "response": "answer"},
        {"instruction": "do", "context": "with", "response": "done"},
        {"instruction": "do", "input": "", "output": "done"},
        {"instruction": "do", "input": "with", "output": "done"},
        {"instruction": "do", "output": ""},
        {"prompt": "", "response": "", "text": "other"},
        {"text": ""},
        {"text": "", "content": "other"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    found = read(tmp_path / "b.jsonl", "\n".join(map(json.dumps, lines)))
    dolly, alpaca = "do\nwith\n\ndone", ["do\n\ndone", "do\nwith\n\ndone"]
    empty = ["do", "other", "", "other"]
    assert found == ["plain", "ask\n\nanswer", dolly, *alpaca, *empty, "hi", "q\n\na"]


def test_a_json_file_is_records_and_no_text(tmp_path: Path) -> None:
    assert read(tmp_path / "a.json", '[{"text": "a"},\n {"text": "b"}]') == ["a", "b"]
    with pytest.raises(PromptError, match=r"a\.json, entry 2: .* needs 'text'"):
        read(tmp_path / "a.json", '[{"text": "a"}, {"x": 1}]')


@pytest.mark.parametrize("name", ["system", "chatgpt", "bing", "bard", "user", "assistant"])
def test_the_names_of_roles_in_sharegpt(name: str, tmp_path: Path) -> None:
    turns = [{"from": name, "value": "a"}, {"from": "human", "value": "b"}]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": turns}]))
    role = name if name in ("system", "user") else "assistant"
    (found,) = documents([tmp_path / "a.json"], Templated(), "a model")
    assert found == Document(f"<{role}>a<user>b<assistant>", special=False)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "is no JSON object"),
        ('{"x": 1}', "line 1: .* needs 'text'"),
        ('{"messages": []}', "line 1: the conversation is empty"),
        ('{"messages": [{"content": "no role"}]}', "line 1: a chat is a list of messages"),
        ('{"messages": [{"role": "user", "content": 5}]}', "line 1: .* not 5"),
        (r'{"text": "a\ud800"}', "line 1: the text holds a character .* at position 1"),
        (r'{"prompt": "a", "response": "\udc00"}', "line 1: the text holds a character"),
        ('{"conversations": [{"from": ["human"], "value": "q"}]}', "line 1: a chat is a list"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        read(tmp_path / "c.jsonl", line)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("answer", "plain", "templated"),
    [
        ({"content": "yes"}, "q\n\nyes", "<user>q<assistant>yes"),
        ({"content": PARTS}, "q\n\na\nb", "<user>q<assistant>a\nb"),
        ({"content": None, "tool_calls": [{}]}, "q", "<user>q<assistant>"),
    ],
)
def test_answers_in_parts_and_answers_without_text(
    answer: dict[str, object], plain: str, templated: str, tmp_path: Path
) -> None:
    """Texts, and nothing that Python makes of a list or of None."""
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]
    line = json.dumps({"messages": chat})
    assert read(tmp_path / "a.jsonl", line) == [plain]
    found = list(documents([tmp_path / "a.jsonl"], Templated(), "a model"))
    assert found == [Document(templated, special=False)]


class Templated(Tokens):
    """Writes each message after its role."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"


class EndingTurns(Templated):
    """Ends each turn with a token of its own, which is not the end of a text."""

    added_tokens_decoder: ClassVar = {7: SimpleNamespace(content="<turn|>")}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        turns = "".join(f"<{each['role']}>{each['content']}<turn|>\n" for each in messages)
        return turns + ("<assistant>" if options["add_generation_prompt"] else "")


def test_answers_end_as_the_target_ends_them(tmp_path: Path) -> None:
    """Else a head learns that the end of a text comes after an answer, which never does."""
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [{}]},
        ],
        [{"role": "user", "content": "q"}],
    ]
    lines = [
        *({"messages": chat} for chat in chats),
        {"prompt": "q", "response": "a"},
        {"text": "a"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = documents([tmp_path / "a.jsonl"], EndingTurns(), "a model")
    asked = "<user>q<turn|>\n<assistant>"
    answered = f"{asked}a<turn|>"
    assert [each.text for each in found] == [answered, asked, asked, answered, "a"]


class Thinking(EndingTurns):
    """Writes an answer's reasoning before it, of the last answer only."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        *before, last = messages
        if options["add_generation_prompt"] or "reasoning_content" not in last:
            return super().apply_chat_template(messages, **options)
        asked = super().apply_chat_template(before, add_generation_prompt=True)
        return f"{asked}<think>{last['reasoning_content']}</think>{last['content']}<turn|>\n"


def test_the_reasoning_of_an_answer_is_learned_as_the_template_writes_it(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "because"}
    line = json.dumps({"messages": [{"role": "user", "content": "q"}, answer]})
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    (found,) = documents([path], Thinking(), "a model")
    asked = "<user>q<turn|>\n<assistant>"
    assert found.text == f"{asked}<think>because</think>a<turn|>"
    with pytest.raises(PromptError, match="leaves out the reasoning of an answer"):
        list(documents([path], EndingTurns(), "a model"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot read training file"):
        list(documents([tmp_path / "none.txt"], Tokens(), "a model"))
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(PromptError, match="not UTF-8"):
        list(documents([tmp_path / "latin.txt"], Tokens(), "a model"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", ""), ("b.json", "[]"), ("c.txt", ""), ("d.txt", " \n\n"), ("e.jsonl", "\n")],
)
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, name: str, text: str) -> None:
    full, file = tmp_path / "full.txt", tmp_path / name
    full.write_text("a")
    file.write_text(text)
    with pytest.raises(PromptError, match=rf"{name} is empty: it holds no text\."):
        list(items([full, file]))


def test_a_table_is_no_prose(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"x\.csv is a table.* \.jsonl file"):
        list(items([tmp_path / "x.csv"]))


def test_blocks_hold_all_documents_in_order() -> None:
    texts = [Document("abc"), Document("de")]
    found = blocks(texts, Tokens(), 3)
    assert found.tolist() == [[0, 1, 2], [99, 3, 4]]
    assert blocks(texts, Tokens(), 3, limit=5).tolist() == [[0, 1, 2]]
    with pytest.raises(PromptError, match="less than one block"):
        blocks([Document("a")], Tokens(), 3)


def test_what_a_chat_template_has_begun_is_not_begun_twice() -> None:
    tokenizer = Tokens()
    tokenizer.begins = True
    found = blocks([Document("ab"), Document("cd", special=False)], tokenizer, 7)
    assert found.tolist() == [[50, 0, 1, 99, 2, 3, 99]]


def test_the_most_frequent_tokens_ascending() -> None:
    assert frequent(torch.tensor([[5, 5, 2], [2, 5, 7]]), 2, 8).tolist() == [2, 5]
    assert frequent(torch.tensor([[5]]), 3, 8).tolist() == [0, 1, 5]


def test_it_is_known_which_tokens_the_target_has_written() -> None:
    texts = [PromptAnswer([1, 2], [3, 9]), PromptAnswer([4], [5]), PromptAnswer([6], [7, 8, 8])]
    tokens, own = cut_answers(texts, 9, 4)
    assert tokens.tolist() == [[1, 2, 3, 9], [4, 5, 9, 6], [7, 8, 8, 9]]
    assert own.int().tolist() == [[0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]]
    few, mine = cut_answers(texts, 9, 4, limit=5)
    assert (few.tolist(), mine.tolist()) == ([[1, 2, 3, 9]], [[False, False, True, True]])
