"""``outpace generate --num-beams``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, BeamSearchParams

Run = Callable[..., Any]
Records = Callable[..., list[dict[str, Any]]]

SHORT = ("--max-tokens", 8, "--ignore-eos")


@pytest.fixture(scope="module")
def plain(target: Path) -> LLM:
    return LLM(target)


def searched(llm: LLM, prompt: str, **options: Any) -> list[str]:
    params = BeamSearchParams(max_tokens=8, ignore_eos=True, **options)
    return [text.text for text in llm.beam_search(prompt, params)[0].sequences]


def test_the_best_texts_are_on_stdout(generate: Run, plain: LLM) -> None:
    flags = ("--length-penalty", 0, "--early-stopping", "never", "--repetition-penalty", 1.3)
    result = generate("w1 w2", "--num-beams", 5, "--n", 3, *SHORT, *flags)
    assert result.exit_code == 0, result.stderr
    asked = {"length_penalty": 0, "early_stopping": "never", "repetition_penalty": 1.3}
    assert result.stdout.splitlines() == searched(plain, "w1 w2", beam_width=5, n=3, **asked)
    assert "3 texts of 5 beams" in result.stderr


def test_stop_strings_end_beams(plain: LLM) -> None:
    free = searched(plain, "w1 w2", beam_width=3)
    word = free[0].split()[3]
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True, stop=[f" {word}"])
    (output,) = plain.beam_search("w1 w2", params)
    ended = [text for text in output.sequences if text.finish_reason == "stop"]
    assert ended
    for text in ended:
        assert text.stop_reason == f" {word}"
        assert f" {word}" not in text.text
        assert len(text.token_ids) <= 8
    assert all(f" {word}" not in text.text for text in output.sequences)


def test_json(generate: Run, plain: LLM) -> None:
    result = generate("w1 w2", "--num-beams", 2, "--n", 2, "--json", *SHORT)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all(f'"index": {index}' in line for index, line in enumerate(lines))
    assert all(
        text in line
        for text, line in zip(searched(plain, "w1 w2", beam_width=2), lines, strict=True)
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--length-penalty", 1), "--length-penalty needs --num-beams"),
        (("--num-beams", 2, "--compare"), "--compare measures speculation"),
        (("--num-beams", 2, "--method", "ngram"), "does not go with a drafter"),
        (("--num-beams", 2, "--seed", 1), "seed does not go with a beam search"),
        (("--num-beams", 2, "--temperature", 0.7), "temperature must be 0"),
        (("--num-beams", 2, "--logprobs", 1, "--json"), "logprobs does not go with"),
        (("--num-beams", 2, "--n", 3), "--num-beams=2 beams: raise --num-beams, or lower --n"),
        (("--num-beams", 2, "--early-stopping", "soon"), "True, False or 'never', not 'soon'"),
        (("--num-beams", 0), "--num-beams must be at least 1, not 0"),
    ],
)
def test_what_does_not_go_together_is_refused(
    generate: Run, flags: tuple[Any, ...], words: str
) -> None:
    result = generate("w1", *flags)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
