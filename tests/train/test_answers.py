"""Text that the target writes itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from outpace.errors import ConfigError, ModelLoadError, PromptError
from outpace.train.answers import Answers, AnswerSettings, fingerprint, prompts
from outpace.train.data import PromptAnswer

from .test_data import Tokens

PROMPTS = [[1, 2], [3]]
SETTINGS = AnswerSettings(
    target="a model",
    temperature=0.8,
    max_tokens=4,
    seed=7,
    prompts=fingerprint(PROMPTS),
)


def write(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
    for prompt, seed in zip(prompts, seeds, strict=True):
        yield [seed, len(prompt)]


def quiet(_: int) -> None:
    """Reports nothing."""


def test_answers_are_added_until_there_are_enough(tmp_path: Path) -> None:
    file = tmp_path / "new" / "answers.jsonl"
    answers = Answers(file, SETTINGS, 10**6)
    reported: list[int] = []
    answers.extend(PROMPTS, 3, write, reported.append)
    assert list(answers) == [
        PromptAnswer([1, 2], [7, 2]),
        PromptAnswer([3], [8, 1]),
        PromptAnswer([1, 2], [9, 2]),
    ]
    assert reported == [1, 2, 3]
    again = Answers(file, SETTINGS, 10**6)
    assert again.count == 3
    again.extend(PROMPTS, 4, write, quiet)
    assert list(again)[3:] == [PromptAnswer([3], [10, 1])]


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    Answers(file, SETTINGS, 10**6).extend(PROMPTS, 3, write, quiet)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    answers = Answers(file, SETTINGS, 10**6)
    assert answers.count == 2
    answers.extend(PROMPTS, 3, write, quiet)
    assert file.read_bytes() == whole


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's /dev/full opens, and takes nothing."""
    answers = Answers(tmp_path / "answers.jsonl", SETTINGS, 10**6)
    monkeypatch.setattr(answers, "_path", Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device") as found:
        answers.extend(PROMPTS, 1, write, quiet)
    assert found.value.filename == "/dev/full"
    assert answers.count == 0


def test_the_file_stays_within_its_bounds(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    answers = Answers(file, SETTINGS, 200)
    answers.extend(PROMPTS, 1000, write, quiet)
    assert answers.full
    assert answers.count < 1000
    assert file.stat().st_size < 200 + 20


def test_answers_under_other_settings_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    Answers(file, SETTINGS, 10**6).extend(PROMPTS, 1, write, quiet)
    for changes, said in (
        ({"target": "b", "temperature": 0.1}, "target and temperature"),
        ({"lora": "a/folder"}, "lora"),
        ({"quantization": "int8"}, "quantization"),
    ):
        with pytest.raises(ConfigError, match=f"another {said}"):
            Answers(file, replace(SETTINGS, **changes), 10**6)
    swapped = AnswerSettings(**{**asdict(SETTINGS), "prompts": fingerprint(PROMPTS[::-1])})
    with pytest.raises(ConfigError, match="another prompts"):
        Answers(file, swapped, 10**6)
    for first in ("no json\n", "[1]\n", json.dumps(asdict(SETTINGS))):
        file.write_text(first)
        with pytest.raises(ModelLoadError, match="delete it to begin anew"):
            Answers(file, SETTINGS, 10**6)


def test_a_file_without_any_answer_begins_anew_under_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    Answers(file, SETTINGS, 10**6)
    other = AnswerSettings(**{**asdict(SETTINGS), "temperature": 0.5})
    Answers(file, other, 10**6).extend(PROMPTS, 1, write, quiet)
    assert Answers(file, other, 10**6).count == 1


@pytest.mark.parametrize("line", ["\0\0\0", "[1, 2, 7, 2]", "[3, [4]]", '"ab"'])
def test_a_line_that_holds_no_answer_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    Answers(file, SETTINGS, 10**6).extend(PROMPTS, 1, write, quiet)
    with file.open("a") as written:
        written.write(f"{line}\n")
    with pytest.raises(ModelLoadError, match="line 3 holds no answer"):
        list(Answers(file, SETTINGS, 10**6))


def test_prompts_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdef\n<|endoftext|>\nbc")
    lines = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"prompt": "a", "response": "b"},
        {"prompt": "abcdef"},
        {"text": "abcdef"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = prompts([tmp_path / "a.txt", tmp_path / "b.jsonl"], Tokens(), "a model", 3)
    letters = ["".join(chr(ord("a") + token) for token in prompt) for prompt in found]
    assert letters == ["abc", "bc", "x\n\n", "a\n\n", "abcdef", "abc"]


def test_prompts_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"answer": 3}')
    with pytest.raises(PromptError, match="line 1: this holds no prompt"):
        prompts([tmp_path / "a.jsonl"], Tokens(), "a model", 3)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "y"}]}')
    with pytest.raises(PromptError, match=r"line 1: .* begins with its answer"):
        prompts([tmp_path / "a.jsonl"], Tokens(), "a model", 3)
    for line in (r'{"text": "a\ud800"}', r'{"prompt": "\udc00"}', r'{"messages": ["\ud800"]}'):
        (tmp_path / "a.jsonl").write_text(line)
        with pytest.raises(PromptError, match=r"a.jsonl, line 1: the prompt holds a character"):
            prompts([tmp_path / "a.jsonl"], Tokens(), "a model", 3)
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(PromptError, match=r"b\.txt is empty"):
        prompts([tmp_path / "b.txt"], Tokens(), "a model", 3)

    assert prompts([], Tokens(), "a model", 3) == [[99]]
