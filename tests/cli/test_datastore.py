"""``outpace datastore``: build one, look at it, use it; mistakes are one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    text, chat = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("w1 w2 w3 w4\n")
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "w5 w6"}]}) + "\n")
    return [text, chat]


def test_a_datastore_is_built_shown_and_used(
    run: Run, target: Path, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    built = run("datastore", "build", *files, "--out", out, "--model", target)
    assert built.exit_code == 0, built.stderr
    shown = run("datastore", "info", out)
    assert shown.exit_code == 0, shown.stderr
    for result in (built, shown):
        words = result.stdout.split()
        assert words[words.index("tokens") + 2] == "7"
    config = json.dumps({"method": "retrieval", "datastore": str(out)})
    used = run("generate", "--model", target, "w1 w2", "--speculative-config", config,
               "--max-tokens", 4, "--temperature", 0)  # fmt: skip
    assert used.exit_code == 0, used.stderr


def test_a_table_of_answers_is_built_shown_and_used(run: Run, target: Path, tmp_path: Path) -> None:
    answers, out = tmp_path / "answers.jsonl", tmp_path / "store"
    answers.write_text('{"target": "t"}\n' + "[[1], [2, 3, 4]]\n" * 3)
    built = run("datastore", "build", "--from-answers", answers, "--no-texts", "--out", out,
                "--model", target)  # fmt: skip
    assert built.exit_code == 0, built.stderr
    assert sorted(file.name for file in out.iterdir()) == ["datastore.json", "table.bin"]
    shown = run("datastore", "info", out)
    assert "3 (left out)" in shown.stdout
    for method in ("suffix", "recycling"):
        config = json.dumps({"method": method, "datastore": str(out)})
        used = run("generate", "--model", target, "w1 w2", "--speculative-config", config,
                   "--max-tokens", 4, "--temperature", 0)  # fmt: skip
        assert used.exit_code == 0, used.stderr
    config = json.dumps({"method": "retrieval", "datastore": str(out)})
    used = run("generate", "--model", target, "w1 w2", "--speculative-config", config)
    assert used.exit_code == 2
    assert "holds no texts" in used.stderr


def test_another_models_datastore_is_refused(
    run: Run, target: Path, stranger: Path, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "store"
    assert run("datastore", "build", *files, "--out", out, "--tokenizer", stranger).exit_code == 0
    config = json.dumps({"method": "retrieval", "datastore": str(out)})
    used = run("generate", "--model", target, "w1 w2", "--speculative-config", config)
    assert used.exit_code == 2
    assert "another tokenizer" in used.stderr


def test_without_a_model_the_bundled_tokenizer_is_taken(
    run: Run, files: list[Path], tmp_path: Path
) -> None:
    result = run("datastore", "build", files[0], "--out", tmp_path / "store")
    assert result.exit_code == 0, result.stderr
    assert "the bundled pair" in result.stdout


def test_a_long_text_is_read_without_a_warning(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("Once upon a time there was a cat. " * 200)
    assert run("datastore", "build", file, "--out", tmp_path / "store").exit_code == 0
    assert "indexing errors" not in caplog.text


def test_mistakes_are_one_sentence(
    run: Run, target: Path, files: list[Path], tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("x")
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"text": "a\\ud800"}')
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    new, model = ("--out", tmp_path / "new"), ("--model", target)
    for arguments, said in (
        (["build", tmp_path / "no.txt", *new, *model], "does not exist"),
        (["build", tmp_path, *new, *model], "is a folder"),
        (["build", *files, "--out", full, *model], "exists already"),
        (["build", *files, "--out", empty, *model], "exists already"),
        (["build", *files, *new, *model, "--tokenizer", target], "exclude each other"),
        (["build", *files, *new, "--model", tmp_path / "no model"], "no folder"),
        (["build", empty, *new, *model], "no text"),
        (["build", torn, *new, *model], "line 1: the text holds a character that is not Unicode"),
        (["build", *new, *model], "nothing to build"),
        (["build", "--from-answers", full, *new, *model], "holds no answers"),
        (["info", full], "is no datastore"),
    ):
        result = run("datastore", *arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr.startswith("outpace: "), result.stderr
        assert said in result.stderr
        assert not (tmp_path / "new").exists()
