"""Where prompts come from, and what is wrong with them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from outpace.cli.flags import prompts
from outpace.cli.flags.prompts import BUILT_IN, Entry, has_piped_input, read_prompts
from outpace.errors import PromptError


def test_an_argument_is_the_prompt() -> None:
    assert read_prompts("w1 w2", None) == [Entry("w1 w2")]


def test_without_prompt_and_pipe_there_is_one_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "has_piped_input", lambda: False)
    assert read_prompts(None, None) == [Entry(BUILT_IN)]


def test_a_pipe_is_read_but_dev_null_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write("w1 ä\n".encode())
    with os.fdopen(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert has_piped_input()
        assert read_prompts(None, None) == [Entry("w1 ä")]
    with open(os.devnull, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert not has_piped_input()
    monkeypatch.setattr("sys.stdin", None)
    assert not has_piped_input()


@pytest.mark.parametrize("dash", [("-", None), (None, Path("-"))])
def test_a_dash_is_standard_input(
    monkeypatch: pytest.MonkeyPatch, dash: tuple[str | None, Path | None]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w1\r\n")))
    assert read_prompts(*dash) == [Entry("w1")]


def test_a_text_file_is_one_prompt_without_its_last_line_break(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfone\ntwo\n\n")
    assert read_prompts(None, file) == [Entry("one\ntwo\n")]


def test_a_jsonl_file_has_one_prompt_per_line_and_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\n", "id": 7, "task": "x"}\n\n{"prompt": "b\u2028c"}\n', "utf-8")
    assert read_prompts(None, file) == [Entry("a\n", 7), Entry("b\u2028c")]
    whole = file.rename(tmp_path / "prompts.json")
    assert read_prompts(None, whole) == [Entry("a\n", 7), Entry("b\u2028c")]
    whole.write_text('[{"prompt": "a"},\n{"prompt": 3}]')
    with pytest.raises(PromptError, match=r'prompts\.json, entry 2 has no "prompt" text'):
        read_prompts(None, whole)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("nonsense\n", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"prompt"', "line 2 is not JSON"),
        ('{"text": "a"}\n', 'line 1 has no "prompt" text'),
        ('["a"]\n', 'line 1 has no "prompt" text'),
        ('{"prompt": 3}\n', 'line 1 has no "prompt" text'),
        ('{"prompt": ""}\n', "line 1 is empty"),
        ('{"prompt": "\\ud800"}\n', "line 1 holds a character that is not Unicode"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_broken_jsonl_file_is_named_with_its_line(
    tmp_path: Path, content: str, sentence: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError, match=r"prompts\.jsonl") as caught:
        read_prompts(None, file)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["prompt.txt", "prompts.jsonl"])
def test_broken_utf8_is_named_with_file_and_offset(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(PromptError, match=r"is not UTF-8 text: byte 0xe9 at offset 15") as caught:
        read_prompts(None, file)
    assert str(file) in str(caught.value)


def test_broken_utf8_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(
        PromptError, match="standard input is not UTF-8 text: byte 0xff at offset 2"
    ):
        read_prompts("-", None)


def test_broken_utf8_in_an_argument() -> None:
    with pytest.raises(PromptError, match=r"the prompt holds a character .* at position 1"):
        read_prompts(os.fsdecode(b"a\xff"), None)


def test_nothing_to_continue(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(PromptError, match=r"empty\.txt is empty"):
        read_prompts(None, tmp_path / "empty.txt")
    with pytest.raises(PromptError, match="the prompt is empty"):
        read_prompts("", None)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"cannot read prompt file '.*missing.txt': No such file"):
        read_prompts(None, tmp_path / "missing.txt")
    with pytest.raises(PromptError, match="cannot read prompt file"):
        read_prompts(None, tmp_path)
    with pytest.raises(PromptError, match="not both"):
        read_prompts("a", tmp_path / "missing.txt")
