"""Prompt files, named sets, Spec-Bench's formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.bench.reports import answered

from outpace.bench.outputs import (
    Answer,
    accept_lengths,
    write_answers,
)
from outpace.bench.prompts import (
    DATA,
    Prompt,
    batches,
    chosen,
    read_prompts,
    read_sets,
    task_of,
)
from outpace.errors import PromptError


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_the_built_in_set_has_several_tasks() -> None:
    prompts = read_prompts("builtin")
    assert len({prompt.task for prompt in prompts}) >= 5
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 12


def test_spec_bench_questions_and_plain_prompts_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Hello", "And now?"]},
        {"id": "x", "task": "code", "prompt": "def f"},
        {"prompt": "bare"},
    )
    assert read_prompts(str(file)) == [
        Prompt("81", "writing", "Hello"),
        Prompt("x", "code", "def f"),
        Prompt("q/3", "q", "bare"),
    ]


def test_names_are_found_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").mkdir()
    write(tmp_path / "prompts" / "gsm8k_test.jsonl", {"id": "1", "task": "m", "prompt": "2+2"})
    assert read_prompts("gsm8k", tmp_path)[0].text == "2+2"
    monkeypatch.setenv(DATA, str(tmp_path))
    assert read_prompts("gsm8k")[0].text == "2+2"
    with pytest.raises(PromptError, match="no prompt file"):
        read_prompts("mbpp")


def test_what_is_missing_or_broken_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA, raising=False)
    with pytest.raises(PromptError, match="did you mean 'gsm8k'"):
        read_prompts("gsm8")
    with pytest.raises(PromptError, match="--data"):
        read_prompts("gsm8k")
    with pytest.raises(PromptError, match="line 2"):
        read_prompts(str(write(tmp_path / "b.jsonl", {"prompt": "a"}, {"text": "b"})))
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(PromptError, match="holds no prompt"):
        read_prompts(str(tmp_path / "e.jsonl"))


def test_a_json_file_may_be_an_array(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('[{"prompt": "one"},\n {"prompt": "two", "task": "m"}]')
    assert read_prompts(str(path)) == [Prompt("p/1", "p", "one"), Prompt("p/2", "m", "two")]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_ends_at_a_line_break_only(separator: str, tmp_path: Path) -> None:
    text = f"one{separator}two"
    path = tmp_path / "p.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False), json.dumps({"prompt": "three"})]
    path.write_bytes("\r\n".join(lines).encode())
    assert [prompt.text for prompt in read_prompts(str(path))] == [text, "three"]
    write_answers(path, [Answer("81", "writing", "target", text, 6, 0.5, 3, (1, 2, 3))])
    assert answered(path)[0]["turns"] == [text]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"prompt": "caf\xe9"}', "is not UTF-8 text: byte 0xe9 at offset 15"),
        (b'{"prompt": 5}', "line 1: the prompt must be text, not 5"),
        (b'{"question_id": 1, "turns": [null]}', "line 1: the prompt must be text, not None"),
        (b'{"question_id": 1, "turns": "Hello"}', "line 1 is no prompt"),
        (b'{"prompt": "a"}\n"prompt"', "line 2 is no prompt"),
        (rb'{"prompt": "\ud800"}', "line 1 holds a character that is not Unicode text"),
        (b"[" * 10**5, "line 1 is not JSON"),
    ],
)
def test_what_is_no_text_is_said_with_its_place(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    with pytest.raises(PromptError, match=message) as raised:
        read_prompts(str(path))
    assert str(path) in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert read_prompts(str(path)) == [Prompt("p/1", "p", "a")]


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").mkdir()
    with pytest.raises(PromptError, match="cannot read prompt file"):
        read_prompts(str(tmp_path / "p.jsonl"))


def test_a_prompt_file_needs_no_suffix(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts", {"prompt": "a"})
    assert read_prompts(str(file)) == [Prompt("prompts/1", "prompts", "a")]
    with pytest.raises(PromptError, match="cannot read prompt file"):
        read_prompts(str(tmp_path))


def test_a_whole_prompt_in_the_place_of_a_file_is_refused_in_a_sentence() -> None:
    for text in ("Once upon a time " * 40, "Once upon a time. " * 40):
        with pytest.raises(PromptError, match=r"no prompt file|unknown prompt set") as raised:
            read_sets(text)
        assert "choose from" in str(raised.value) or "name a .jsonl file" in str(raised.value)


def test_a_path_is_no_set_whatever_it_is_called() -> None:
    with pytest.raises(PromptError, match="there is no prompt file '/nonexistent'"):
        read_prompts("/nonexistent")


def test_few_prompts_are_taken_from_all_tasks() -> None:
    prompts = [Prompt(f"{task}{i}", task, "") for task in "abc" for i in range(4)]
    assert [p.id for p in chosen(prompts, 5)] == ["a0", "b0", "c0", "a1", "b1"]
    assert len(chosen(prompts, None)) == 12


def test_batches_are_full_and_of_one_task_where_possible() -> None:
    prompts = [Prompt(f"{task}{i}", task, "") for i in range(2) for task in "ab"]
    found = batches(prompts, 2)
    assert [[p.id for p in batch] for batch in found] == [["a0", "a1"], ["b0", "b1"]]
    assert [task_of(batch) for batch in found] == ["a", "b"]
    assert task_of(batches(prompts, 3)[0]) == "mixed"
    each_once = [[p.id for p in batch] for batch in batches(prompts, 3)]
    assert each_once == [["a0", "a1", "b0"]], "no prompt is answered a second time"
    with pytest.raises(PromptError, match="at least that many"):
        batches(prompts, 5)


def test_answers_are_written_as_spec_bench_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "model_answer" / "ours.jsonl"
    write_answers(path, [Answer("81", "writing", "target", "Aloha", 6, 0.5, 3, (1, 2, 3))])
    line = json.loads(path.read_text())
    assert (line["question_id"], line["category"]) == ("81", "writing")
    choice = line["choices"][0]
    assert (choice["new_tokens"], choice["wall_time"]) == ([6], [0.5])
    assert (choice["decoding_steps"], choice["accept_lengths"]) == ([3], [1, 2, 3])


def test_accept_lengths_come_from_the_counters() -> None:
    assert accept_lengths([3, 1], passes=5) == (1, 1, 2, 2, 3)
    assert accept_lengths([], passes=2) == (1, 1)
    assert sum(accept_lengths([3, 1], passes=5)) == 5 + 4


def test_the_editing_set_comes_with_the_package() -> None:
    prompts = read_prompts("editing")
    kinds = {prompt.task for prompt in prompts}
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 40
    assert kinds == {
        f"editing/{kind}" for kind in ("rename", "hints", "bug", "docstring", "errors")
    }
    assert all("```python\n" in prompt.text for prompt in prompts)
