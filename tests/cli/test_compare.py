"""``--compare``: what is run, and what is said about it. No speeds are asserted."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace import LLM, SamplingParams
from outpace.cli import compare
from outpace.cli.compare import Comparison, Run, measure, plain_llm
from outpace.core.stats import Metrics

Invoke = Callable[..., Any]


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "REPEATS", 2)


def test_the_text_comes_first_then_the_table(generate: Invoke, drafter: Path) -> None:
    result = generate("w1", "--draft", drafter, "-k", 3, "--compare", "--max-tokens", 8)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.split()) <= 8
    assert "measuring, 1 of 2 ...\nmeasuring, 2 of 2 ...\n" in result.stderr, "line by line"
    assert "drafting: draft model: " in result.stderr
    for words in ("speed-up", "acceptance rate", "target passes", "same text, token for token"):
        assert words in result.stderr


def test_json_holds_both_sides(generate: Invoke, drafter: Path) -> None:
    result = generate("w1", "--draft", drafter, "-k", 3, "--compare", "--json", "--max-tokens", 8)
    assert result.exit_code == 0, result.stderr
    [line] = result.stdout.splitlines()
    found = json.loads(line)
    assert found["identical"] is True
    assert found["plain"]["num_tokens"] == found["speculative"]["num_tokens"] == 8
    assert found["plain"]["num_target_passes"] == 8
    assert found["plain"]["num_draft_tokens"] == 0
    assert found["speculative"]["num_draft_tokens"] > 0
    assert found["speed_up_range"][0] <= found["speed_up_range"][1]
    assert len(found["plain"]["seconds"]) == found["repeats"] == 2
    assert found["outputs"][0]["prompt"] == "w1"


@pytest.mark.parametrize("flags", [(), ("-k", 2), ("--verify", "coupled")])
def test_with_no_method_named_look_ups_are_compared(
    generate: Invoke, flags: tuple[str | int, ...]
) -> None:
    result = generate("w1 w2 w1", "--compare", "--json", "--max-tokens", 8, *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["identical"] is True
    assert found["plain"]["num_target_passes"] == 8


def test_a_drafter_that_is_the_target_is_always_right(target: Path) -> None:
    llm = LLM(target, speculative_config={"model": str(target), "num_speculative_tokens": 3})
    told: list[str] = []
    params = SamplingParams(max_tokens=8, temperature=0, stop="w")
    found = measure(llm, plain_llm(llm, {}), ["w1", "w2 w3"], params, told.append)
    assert found.total.acceptance_rate == 1
    assert [len(text) for text in found.speculative[0].token_ids] == [8, 8]
    assert len(told) == 2
    assert "2 prompts" in found.what


def test_the_baseline_has_no_drafter_and_the_same_target(target: Path, drafter: Path) -> None:
    """A drafter would be told of its rounds, and may have the target's states read."""
    options = {"dtype": "float32", "max_model_len": 40, "generation_config": "none"}
    config = {"model": str(drafter), "num_speculative_tokens": 2}
    llm = LLM(target, max_num_seqs=3, speculative_config=config, **options)
    plain = plain_llm(llm, options | {"speculative_config": config})
    assert plain.engine.drafter.name == "none"
    assert plain.target is llm.target
    assert plain.max_model_len == 40
    assert plain.engine.target.max_rows == 3
    drafted: list[int] = []
    with llm.engine.observing(lambda trace: drafted.append(max(trace.budgets))):
        measure(llm, plain, ["w1"], SamplingParams(max_tokens=8, temperature=0), lambda text: None)
    rounds = len(drafted)
    with llm.engine.observing(lambda trace: drafted.append(0)):
        llm.generate("w1", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert rounds == 3 * (len(drafted) - rounds), "a warm-up and two runs, and no plain ones"


def test_sampled_texts_differ_by_design_and_coupled_ones_do_not(
    target: Path, drafter: Path
) -> None:
    for rule, words in {"token": "differ by design", "coupled": "token for token"}.items():
        config = {"model": str(drafter), "verify": rule, "num_speculative_tokens": 2}
        llm = LLM(target, speculative_config=config)
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=1)
        found = measure(llm, plain_llm(llm, {}), ["w1"], params, lambda text: None)
        assert words in found.note
        assert found.plain[0].token_ids != found.plain[1].token_ids, "one seed per repeat"


def test_patience_ends_the_repeats(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "REPEATS", 9)
    monkeypatch.setattr(compare, "PATIENCE", 0.0)
    llm = LLM(target, speculative_config={"method": "ngram"})
    found = measure(
        llm, plain_llm(llm, {}), ["w1"], SamplingParams(max_tokens=2), lambda text: None
    )
    assert len(found.plain) == 1


def run(seconds: float, text: list[int], drafted: int = 2, passes: int = 4) -> Run:
    counts = {"num_draft_tokens": drafted, "num_accepted_tokens": drafted // 2}
    tokens = {"num_emitted_tokens": 4, "num_target_passes": passes}
    return Run(seconds, Metrics(total_seconds=seconds, **counts, **tokens), [text])


def runs(*texts: list[int], seconds: float = 1.0) -> list[Run]:
    return [run(seconds, text) for text in texts]


def comparison(**changes: Any) -> Comparison:
    defaults: dict[str, Any] = {
        "plain": runs([1, 2, 3], [1, 2, 3], seconds=2.0),
        "speculative": runs([1, 2, 3], [1, 7, 3]),
        "what": "greedy",
        "expects_identity": True,
        "lossless": True,
        "dtype": "float32",
    }
    return Comparison(**{**defaults, **changes})


def test_a_difference_that_should_not_be_is_told_with_its_place() -> None:
    found = comparison()
    assert not found.identical
    assert found.note.startswith("The texts differ from token 2 on: in float32,")
    assert (found.speed_up, found.spread) == (2.0, (2.0, 2.0))


def timed(plain: list[float], fast: list[float], drafted: int = 2) -> Comparison:
    return comparison(
        plain=[run(seconds, [1], 0) for seconds in plain],
        speculative=[run(seconds, [1], drafted) for seconds in fast],
    )


@pytest.mark.parametrize(
    ("plain", "fast", "told"),
    [
        ([2.0, 2.1, 2.0], [1.0, 1.1, 1.0], 2.0),
        ([2.0, 2.1, 2.0], [1.0, 2.2, 1.0], None),  # one pair says the contrary
        ([1.0, 1.1, 1.0], [2.0, 2.1, 2.0], 0.5),
        ([4.0, 8.1, 4.0], [1.0, 1.1, 1.0], None),  # a busy machine
        ([1.05], [1.0], None),  # a single pair that is hardly apart
        ([2.0], [1.0], 2.0),
    ],
)
def test_no_ratio_is_told_within_the_noise(
    plain: list[float], fast: list[float], told: float | None
) -> None:
    found = timed(plain, fast)
    assert found.speed_up == (None if told is None else pytest.approx(told))
    assert found.as_dict()["speed_up"] == found.speed_up
    shown = text_of(found.table())
    assert ("within the noise" in shown) is (told is None)
    assert told is None or f"{told:.2f}x" in shown


def test_no_ratio_is_told_where_nothing_was_drafted() -> None:
    found = timed([2.0, 2.1, 2.0], [1.0, 1.1, 1.0], drafted=0)
    assert found.speed_up is None
    assert "speed-up" not in text_of(found.table())
    assert "nothing drafted" in text_of(found.table())


def test_all_numbers_of_a_side_are_those_of_one_run() -> None:
    """Medians of some and means of others do not fit each other."""
    speculative = [run(1.0, [1], 6, 1), run(2.0, [1], 2, 4), run(4.0, [1], 2, 2)]
    found = comparison(plain=[run(5.0, [1], 0)] * 3, speculative=speculative)
    plain, side = (found.as_dict()[name] for name in ("plain", "speculative"))
    assert side["tokens_per_second"] == side["num_tokens"] / 2.0
    assert side["mean_acceptance_length"] == side["num_tokens"] / side["num_target_passes"] == 1.0
    assert side["acceptance_rate"] == side["num_accepted_tokens"] / side["num_draft_tokens"] == 0.5
    assert found.speed_up == side["tokens_per_second"] / plain["tokens_per_second"]


def text_of(table: Any) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_a_lossy_rule_is_named_as_the_reason() -> None:
    assert "the rule is lossy" in comparison(lossless=False).note
    assert "another distribution" in comparison(lossless=False, expects_identity=False).note


@pytest.mark.parametrize(
    "flags", [("--method", "none"), ("--speculative-config", '{"method": "none"}')]
)
def test_there_must_be_something_to_compare(generate: Invoke, flags: tuple[str, ...]) -> None:
    result = generate("w1", "--compare", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("outpace: --compare needs a drafter")
