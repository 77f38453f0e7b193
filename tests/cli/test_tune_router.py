"""``outpace tune router``: from example prompts to a file that method "task" takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.errors import ConfigError
from outpace.methods.choosers.classifier import TaskClassifier

Run = Callable[..., Any]


def test_a_router_is_trained_from_files(run: Run, tmp_path: Path) -> None:
    sums, tales = tmp_path / "sums.txt", tmp_path / "tales.jsonl"
    sums.write_text("\n".join(f"what is {n} + {n}?" for n in range(8)))
    lines = (json.dumps({"prompt": f"a tale of {n} foxes"}) for n in range(8))
    tales.write_text("\n".join(lines))
    out = tmp_path / "router.npz"
    data = ("--data", f"maths={sums}", "--data", f"tales={tales}")
    result = run("tune", "router", *data, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "2 tasks (maths, tales)" in result.stdout
    assert TaskClassifier.load(out).task_of("what is 3 + 9?")[0] == "maths"


def test_what_must_be_installed_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one prompt\nand another")
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    for asked in (("router", "--data", f"a={few}", "--data", f"b={few}"), ("layers",)):
        result = run("tune", *asked)
        assert result.exit_code == 2
        assert "pip install 'outpace[tune]'" in " ".join(result.stderr.split())


def test_a_model_with_a_router_is_not_loaded_without_the_package(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = tmp_path / "router.npz"
    texts = {"a": ["one fox", "two foxes"], "b": ["3 + 4", "5 + 6"]}
    TaskClassifier.trained(texts, seed=-1).save(router)
    routes = {task: {"method": "ngram"} for task in texts}
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    config = {"method": "task", "router": str(router), "routes": routes}
    with pytest.raises(ConfigError, match="a router of tasks needs scikit-learn: pip install"):
        LLM(str(target), speculative_config=config)


def test_mistakes_are_told_in_a_sentence(run: Run, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one prompt")
    for words, data in (
        ("TASK=FILE", ["--data", "maths"]),
        ("two prompts of each, and 'a' has 1.", ["--data", f"a={few}", "--data", f"b={few}"]),
        ("cannot read", ["--data", f"a={tmp_path / 'none.txt'}"]),
    ):
        result = run("tune", "router", *data)
        assert result.exit_code == 2
        assert words in result.stderr
