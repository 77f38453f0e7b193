"""A lossy rule tells how far it is from the target's distribution, beside its speed; others tell
nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.bench import divergence as replaying
from outpace.bench.divergence import TOKENS, replay, watching
from outpace.cli import compare, printing
from outpace.engine.request import Logprob
from outpace.heads.classifiers import JudgeHead

Run = Callable[..., Any]
Records = Callable[..., list[dict[str, Any]]]

SAMPLED = ("--temperature", 1.0, "--seed", 3, "--max-tokens", 24, "--ignore-eos")
SENTENCE = r"verify=typical is lossy: mean total variation 0\.\d{3} per token over \d+ states"


def speculating(model: Path, verify: Any, count: int | str = 3) -> tuple[str, str]:
    config = {"model": str(model), "num_speculative_tokens": count, "verify": verify}
    return "--speculative-config", json.dumps(config)


@pytest.mark.parametrize("more", [(), ("--n", 2), ("--no-stream",)])
def test_the_last_line_says_how_lossy_it_was(
    generate: Run, drafter: Path, more: tuple[Any, ...]
) -> None:
    result = generate("w1 w2", *speculating(drafter, "typical"), *SAMPLED, *more)
    assert result.exit_code == 0, result.stderr
    assert re.match(SENTENCE, result.stderr.strip().splitlines()[-1])


def test_a_comparison_says_so_too(
    generate: Run, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "REPEATS", 1)
    flags = ("w1", *speculating(drafter, "typical"), *SAMPLED, "--compare")
    said = generate(*flags).stderr
    assert len(re.findall(SENTENCE, said)) == 1
    assert said.index("speed-up") < said.index("verify=typical is lossy: mean")
    [line] = generate(*flags, "--json").stdout.splitlines()
    found = json.loads(line)
    assert found["divergence"]["mean"] > 0
    assert "divergence" not in found["outputs"][0]


def test_json_has_an_object(records: Records, drafter: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("w1 w2\n")
    flags = (*speculating(drafter, "typical"), *SAMPLED)
    [one] = records("w1 w2", *flags)
    found = one["divergence"]
    assert list(found) == ["rule", "mean", "largest", "states", "unseen"]
    assert found["rule"] == "typical"
    assert 0 < found["mean"] <= found["largest"] <= 1
    assert found["states"] > 3
    assert records("w1 w2", *flags)[0]["divergence"] == found


def test_a_token_that_the_options_rule_out_has_no_number_that_json_lacks() -> None:
    probs = {3: Logprob(-math.inf, 9, "c"), 4: Logprob(0.0, 1, "d")}
    written = printing._logprobs(3, probs)
    assert json.loads(json.dumps(written, allow_nan=False))["logprob"] is None
    assert [one["token_id"] for one in written["top"]] == [4]


@pytest.mark.parametrize("verify", ["token", "block", "coupled"])
def test_a_lossless_rule_says_and_costs_nothing(
    generate: Run, drafter: Path, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "watching", None)
    result = generate("w1 w2", *speculating(drafter, verify), *SAMPLED)
    assert result.exit_code == 0, result.stderr
    assert "lossy" not in result.stderr
    assert "divergence" not in generate("w1", *speculating(drafter, verify), *SAMPLED).stdout


def test_the_texts_are_those_that_come_without_the_replay(
    generate: Run, target: Path, drafter: Path
) -> None:
    flags = ("w1 w2", *speculating(drafter, "typical"), *SAMPLED)
    config = {"model": drafter, "num_speculative_tokens": 3, "verify": "typical"}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    text = LLM(target, speculative_config=config).generate("w1 w2", params)[0].text
    assert generate(*flags).stdout == text + "\n"
    assert json.loads(generate(*flags, "--json").stdout)["text"] == text


def test_what_cannot_be_measured_is_said_in_a_sentence(
    generate: Run, drafter: Path, tmp_path: Path
) -> None:
    head = str(tmp_path / "head.pt")
    JudgeHead(torch.linspace(-1, 1, 32)).save(head)
    for verify in ({"name": "judge", "head": head}, {"name": "reflective", "prompt": "w3"}):
        flags = ("w1", *speculating(drafter, verify), "--max-tokens", 12, "--ignore-eos")
        last = generate(*flags, "--temperature", 1.0).stderr.strip().splitlines()[-1]
        assert last.startswith(f"verify={verify['name']} is lossy, by how much is not known: ")
        [record] = generate(*flags, "--temperature", 1.0, "--json").stdout.splitlines()
        found = json.loads(record)["divergence"]
        assert found == {"rule": verify["name"], "unmeasured": last}
        greedy = generate(*flags).stderr.strip().splitlines()[-1]
        assert "is lossy: mean total variation" in greedy


def test_where_nothing_is_drafted_nothing_is_changed(generate: Run) -> None:
    result = generate("w1", "--verify", "typical", "--max-tokens", 4)
    last = result.stderr.strip().splitlines()[-1]
    assert last == "verify=typical is lossy, but nothing was drafted: nothing was changed"


def test_the_replay_is_short_and_leaves_the_controller_as_it_was(
    target: Path, drafter: Path
) -> None:
    config = {"model": drafter, "verify": "typical"}
    llm = LLM(target, speculative_config=config, max_num_seqs=4)
    params = SamplingParams(temperature=1.0, seed=1, ignore_eos=True, max_tokens=400)
    controller = llm.engine.controller
    written = []
    generate = llm.generate
    llm.generate = lambda *args: written.extend(generate(*args)) or written  # type: ignore[method-assign]
    found = replay(llm, ["w1", "w2", "w3", "w4", "w5"], params)
    assert sum(len(output.token_ids) for output in written) == TOKENS
    assert llm.engine.controller is controller
    assert controller._budget.spent == 0  # type: ignore[attr-defined]
    assert found is not None
    assert found.divergence is not None
    assert found.divergence.states > 5


def test_a_rule_that_peeks_is_watched_only_where_drafts_are_given(
    target: Path, drafter: Path
) -> None:
    verify = {"name": "reflective", "prompt": "w3"}
    config = {"model": drafter, "num_speculative_tokens": 2, "verify": verify}
    llm = LLM(target, speculative_config=config)
    for temperature, blocked in ((1.0, True), (0.0, False)):
        params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True, max_tokens=8)
        with watching(llm) as watch:
            llm.generate("w1", params)
        assert watch.blocked is blocked
        assert bool(watch.found) is not blocked
