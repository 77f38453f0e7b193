"""``outpace doctor``: what it prints, what it advises, and its errors."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.cli.doctor import Advice, labels

Run = Callable[..., Any]
SHORT = ("--max-tokens", 6, "-k", 2)


def test_all_is_said_in_lines_and_tables(run: Run, target: Path, drafter: Path) -> None:
    done = run("doctor", "-m", target, "--draft", drafter, *SHORT)
    assert done.exit_code == 0, (done.output, done.exception)
    text = " ".join(done.stdout.split())
    for words in (
        "processor: ", "threads: ", "memory: ", "GB/s", "What computes the model", "self_attn (2)",
        "output matrix", "a pass over 1 token", "a pass over 8 tokens", "look-ups (suffix)",
        "draft_model, code", "draft_model, editing: ", "look-ups, all", "tokens/s", "What to type:",
    ):  # fmt: skip
        assert words in text, words
    assert f"outpace bench run -m {target} --speculative-config" in done.stdout


def test_json_is_one_object_with_the_commands(run: Run, target: Path, drafter: Path) -> None:
    done = run("doctor", "-m", target, "--draft", drafter, "--dtype", "float64", *SHORT, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)
    assert [each["columns"] for each in found["passes"]] == [1, 2, 4, 8]
    assert [each["model"] for each in found["drafters"]] == [None, str(drafter)]
    assert all(kind["why"] for each in found["drafters"] for kind in each["kinds"])
    words = shlex.split(found["command"])
    assert words[:4] == ["outpace", "generate", "-m", str(target)]
    assert ("--draft" in words) == (found["best"] is not None)
    assert words[-2:] == ["--chat", "your text"]
    assert words[4:6] == ["--dtype", "float64"]


def test_the_commands_that_are_advised_run(run: Run, target: Path, drafter: Path) -> None:
    done = run("doctor", "-m", target, "--draft", drafter, *SHORT, "--json")
    found = json.loads(done.stdout)
    _, *generate = shlex.split(found["command"])
    written = run(*generate, "--max-tokens", 4)
    assert written.exit_code == 0, (written.output, written.exception)
    _, *bench = shlex.split(found["benchmark"])
    measured = run(*bench, "--num-prompts", 2, "--max-tokens", 4)
    assert measured.exit_code == 0, (measured.output, measured.exception)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft", "no/such/folder"], "no/such/folder"),
        (["--dtype", "int7"], "unknown --dtype 'int7'"),
        (["--max-model-len", "20", "--max-tokens", "18"], "give a smaller --max-tokens"),
        (["-k", "0"], "-k"),
        (["--quantization", "int3"], "int3"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, target: Path, flags: list[str], words: str) -> None:
    done = run("doctor", "-m", target, *flags)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


# -- advice ----------------------------------------------------------------------------------------


def drafter_named(name: str, model: str | None, *verdicts: str) -> Any:
    kinds = [SimpleNamespace(kind=f"kind{n}", verdict=each) for n, each in enumerate(verdicts)]
    method = "suffix" if model is None else "draft_model"
    return SimpleNamespace(name=name, method=method, model=model, kinds=kinds)


def advice(best: str | None, model: str | None, looked: str, *flags: str) -> Advice:
    """What is advised where look-ups are judged like that, and a model is the best or is not."""
    drafters = [drafter_named("look-ups", None, looked)]
    if model is not None:
        drafters.append(drafter_named("small", model, "gain" if best else "no gain"))
    found: Any = SimpleNamespace(drafters=drafters, best=best, chat=True, slow=None)
    return Advice(found, [model] if model and model != "bundled" else [], flags, 512)


@pytest.mark.parametrize(
    ("given", "command", "reason"),
    [
        (
            advice("small", "a small", "gain", "-m", "big"),
            "-m big --max-model-len 512 --draft 'a small' --chat 'your text'",
            "draft_model pays here. With it named, auto drafts by it or by look-ups.",
        ),
        (
            advice(None, "small", "gain", "-m", "big"),
            "-m big --max-model-len 512 --chat 'your text'",
            "Look-ups pay on kind0. draft_model is not sure to pay.",
        ),
        (
            advice(None, None, "unclear", "-m", "big"),
            "-m big --max-model-len 512 --chat 'your text'",
            "Look-ups are not sure to pay, but cost next to nothing, and auto makes them only "
            "where they do.",
        ),
        (
            advice("small", "bundled", "no gain"),
            "--max-model-len 512 --chat 'your text'",
            "draft_model pays here.",
        ),
        (
            advice(None, "bundled", "gain"),
            "--max-model-len 512 --method auto --chat 'your text'",
            "Look-ups pay on kind0. draft_model is not sure to pay.",
        ),
    ],
)
def test_what_is_advised(given: Advice, command: str, reason: str) -> None:
    assert given.command == f"outpace generate {command}"
    assert given.reason == reason


def test_the_benchmark_compares_what_was_looked_at() -> None:
    words = shlex.split(advice("small", "a small", "gain", "-m", "big").benchmark)
    assert words[:5] == ["outpace", "bench", "run", "-m", "big"]
    assert words[5:7] == ["--llm", '{"max_model_len": 512}']
    configs = [json.loads(b) for a, b in itertools.pairwise(words) if "spec" in a]
    assert configs == [{"method": "suffix"}, {"method": "draft_model", "model": "a small"}]


def test_drafters_have_short_labels() -> None:
    listed = [drafter_named(name, model) for name, model in (("l", None), ("a.gguf", "x/a.gguf"))]
    found: Any = SimpleNamespace(drafters=listed)
    assert labels(found) == {"l": "look-ups", "a.gguf": "draft_model"}
    found.drafters = [*listed, drafter_named("b.gguf", "x/b.gguf")]
    assert list(labels(found).values()) == ["look-ups", "draft_model (1)", "draft_model (2)"]
