"""``outpace tune layers``: a search that can be stopped and resumed, and the file it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.targets.base import SubLayers
from outpace.tune.layers import LayerTrials, Outcome, Prediction

Run = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w7 w8"}\n')
    return file


@pytest.fixture
def tune(run: Run, target: Path, prompts: Path, tmp_path: Path) -> Run:
    """Runs the search on the tiny target."""

    def invoke(trials: int, *more: Any, model: Path = target) -> Any:
        given = ("--model", model, "--prompts", prompts, "--out", tmp_path / "layers.json")
        return run("tune", "layers", *given, "--trials", trials, "--max-tokens", 24, *more)

    return invoke


def test_what_is_found_is_taken_and_the_search_goes_on(
    tune: Run, generate: Run, tmp_path: Path
) -> None:
    first = tune(3)
    assert first.exit_code == 0, first.stderr
    file = tmp_path / "layers.json"
    assert json.loads(file.read_text())["found"]["trials"] == 3
    assert f"{file}: " in first.stdout
    assert tune(5).exit_code == 0
    found = json.loads(file.read_text())
    assert found["found"]["trials"] == 5
    assert found["attention"] or found["mlp"]
    config = json.dumps({"method": "layer_skip", "layers": str(file), "num_speculative_tokens": 3})
    flags = ("--temperature", 0, "--max-tokens", 12, "--ignore-eos", "--json")
    drafted = generate("w1 w2", "--speculative-config", config, *flags)
    assert drafted.exit_code == 0, drafted.stderr
    plain = generate("w1 w2", "--method", "none", *flags)
    assert json.loads(drafted.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]


def test_ctrl_c_keeps_what_was_found(
    tune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []
    real = LayerTrials.play

    def play(self: LayerTrials, skipped: SubLayers) -> Iterator[Prediction]:
        played.append(skipped)
        if len(played) == 3:
            raise KeyboardInterrupt
        return real(self, skipped)

    monkeypatch.setattr(LayerTrials, "play", play)
    stopped = tune(8)
    assert stopped.exit_code == 0, stopped.stderr
    assert "the same command goes on" in stopped.stderr
    assert json.loads((tmp_path / "layers.json").read_text())["found"]["trials"] >= 2


def test_another_days_trials_are_compared_by_their_speed_ups(
    tune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is busier today does not make yesterday's layers faster."""

    def sitting(trials: int, plain: float, speed: float) -> dict[str, Any]:
        monkeypatch.setattr(LayerTrials, "measure_plain", lambda self: plain)
        played = [Prediction(speed, 2, 0.5)] * 2
        monkeypatch.setattr(LayerTrials, "play", lambda self, skipped: iter(played))
        assert tune(trials).exit_code == 0
        found: dict[str, Any] = json.loads((tmp_path / "layers.json").read_text())["found"]
        return found

    assert sitting(2, plain=100, speed=80)["predicted_tokens_per_second"] == 80
    again = sitting(2, plain=10, speed=8)
    assert again["predicted_tokens_per_second"] == 8
    assert again["plain_tokens_per_second"] == 10
    assert sitting(12, plain=10, speed=12)["predicted_tokens_per_second"] == 12


def test_a_study_of_which_the_last_line_is_cut_off_goes_on(tune: Run, tmp_path: Path) -> None:
    assert tune(2).exit_code == 0
    study = tmp_path / "layers.study"
    study.write_bytes(study.read_bytes()[:-20])
    for trials in (3, 4):
        resumed = tune(trials)
        assert resumed.exit_code == 0, resumed.stderr
    assert json.loads((tmp_path / "layers.json").read_text())["found"]["trials"] == 4


@pytest.mark.parametrize(
    "more", [("--study", "layers.json"), ("--out", "layers.study")], ids=lambda more: more[0]
)
def test_layers_and_search_need_a_file_each(
    more: tuple[str, str], tune: Run, tmp_path: Path
) -> None:
    flag, name = more
    refused = tune(2, flag, tmp_path / name)
    assert refused.exit_code == 2
    assert "at once" in " ".join(refused.stderr.split())
    assert not (tmp_path / name).exists()


@pytest.fixture
def another(copy_of_target: Path) -> Path:
    """A model of the same shape that was trained further, as far as that shows in its norms."""
    model = LlamaForCausalLM.from_pretrained(copy_of_target)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(copy_of_target)
    return copy_of_target


def test_a_study_or_file_of_another_model_is_refused(
    tune: Run, run: Run, another: Path, tmp_path: Path
) -> None:
    assert tune(2).exit_code == 0
    other = tune(3, model=another)
    assert other.exit_code == 2
    assert "is about target (llama, 2 layers of 32), not copy" in other.stderr
    config = json.dumps({"method": "layer_skip", "layers": str(tmp_path / "layers.json")})
    refused = run("generate", "w1", "--model", another, "--speculative-config", config)
    assert refused.exit_code == 2
    assert "run `outpace tune layers` for this model" in refused.stderr


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--at-most", 1), "other prompts"),
        (("--seed", 1, "--temperature", 1), "other seed and temperature"),
    ],
    ids=str,
)
def test_a_study_with_other_prompts_or_options_is_refused(
    more: tuple[Any, ...], named: str, tune: Run
) -> None:
    assert tune(2).exit_code == 0
    refused = tune(3, *more)
    assert refused.exit_code == 2
    assert f"was made with {named}" in " ".join(refused.stderr.split())


def test_a_study_that_is_none_and_a_folder_that_is_none_are_refused(
    tune: Run, prompts: Path, tmp_path: Path
) -> None:
    wrong = tune(2, "--study", prompts)
    assert wrong.exit_code == 2
    assert "not a study of `outpace tune layers`" in wrong.stderr
    lost = tune(2, "--out", tmp_path / "nowhere" / "layers.json")
    assert lost.exit_code == 2
    assert "there is no folder" in lost.stderr
    folder = tune(2, "--out", tmp_path)
    assert folder.exit_code == 2
    assert "is a folder: name a file" in " ".join(folder.stderr.split())


def test_rates_are_of_the_drafts_that_came_so_far() -> None:
    outcome = Outcome(drafted=[99, 99], accepted=[49, 24])
    first, second = outcome.rates()
    assert first == pytest.approx(0.495)
    assert second == pytest.approx(24.5 / 50)
    assert outcome.acceptance() == pytest.approx(73 / 198)
