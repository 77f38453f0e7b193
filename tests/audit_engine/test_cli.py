"""``outpace audit``: verbs, exit codes and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace import LLM
from outpace.audit.letters import letter_model
from outpace.cli.audit import app, coupled_twin, prompts_in
from outpace.errors import ConfigError, PromptError
from outpace.methods.models.noisy_copy import noisy_copy


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = letter_model()
    target.save_pretrained(folder / "target")
    noisy_copy(target, 0.3).save_pretrained(folder / "drafter")
    return folder


def models(pair: Path) -> list[str]:
    return ["-m", str(pair / "target"), "--draft", str(pair / "drafter"), "-k", "2"]


def test_model_reports_and_leaves_with_0(pair: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3]}\n{"prompt_token_ids": [4]}\n')
    asked = ["model", *models(pair), "--samples", "8", "--prompts", str(prompts), "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["text"]["observations"] == 8 * 6
    assert set(report["detectable"]) == {"sharper", "flatter"}


def test_a_lossy_rule_leaves_with_1(pair: Path) -> None:
    config = {
        "model": str(pair / "drafter"),
        "num_speculative_tokens": 3,
        "verify": {"name": "lenient", "lenience": 0.1},
    }
    asked = ["model", "-m", str(pair / "target"), "--speculative-config", json.dumps(config)]
    done = CliRunner().invoke(app, [*asked, "--samples", "600"])
    assert done.exit_code == 1, done.output
    assert "REFUTED" in done.output
    assert "lossy by declaration" in done.output


def test_chats_are_audited_through_the_template() -> None:
    asked = ["diff", "-k", "2", "--chat", "--max-tokens", "4", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["texts"]["greedy"] == 20  # ten, and the first tokens of each


def test_diff_prints_its_tolerance(pair: Path) -> None:
    done = CliRunner().invoke(app, ["diff", *models(pair), "--max-tokens", "12"])
    assert done.exit_code == 0, done.output
    assert "tolerance" in done.output
    assert "OK" in done.output


def test_the_coupled_engine_plays_the_target_as_it_was_loaded(pair: Path) -> None:
    # What was made fast is not checked as if it were new: the check of exact layers would refuse
    # layers whose weights are in blocks, because these round.
    config = {"model": str(pair / "drafter"), "num_speculative_tokens": 2}
    llm = LLM(str(pair / "target"), speculative_config=config)
    twin = coupled_twin(llm, {"dtype": "float32", "max_num_batched_tokens": 64})
    assert twin.target is llm.target
    assert twin.config.rule_name == "coupled"


@pytest.mark.parametrize("verb", ["model", "diff"])
def test_the_audited_model_is_loaded_as_by_other_verbs(
    verb: str, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def llm(model: str, **arguments: Any) -> None:
        given.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr("outpace.cli.audit.load_llm", lambda m, a, *_, **__: llm(m, **a))
    flags = ["--quantization", "int8", "--threads", "1", "--max-model-len", "64"]
    flags += ["--llm", '{"max_num_batched_tokens": 64}']
    done = CliRunner().invoke(app, [verb, *models(pair), *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    wanted = {"quantization": "int8", "threads": 1, "max_model_len": 64}
    wanted |= {"max_num_batched_tokens": 64, "dtype": "auto"}
    assert wanted.items() <= given[0].items()
    for name, flag in (("max_model_len", "--max-model-len"), ("speculative_config", "flags of")):
        done = CliRunner().invoke(app, [verb, *models(pair), "--llm", json.dumps({name: 8})])
        assert isinstance(done.exception, ConfigError)
        assert flag in str(done.exception)


def test_diff_takes_weights_in_8_bits(pair: Path) -> None:
    flags = ["--quantization", "int8", "--max-model-len", "64", "--max-tokens", "4"]
    done = CliRunner().invoke(app, ["diff", *models(pair), *flags])
    assert done.exit_code == 0, (done.output, done.exception)


def test_diff_does_not_call_a_lossy_rule_a_bug(pair: Path) -> None:
    config = {
        "model": str(pair / "drafter"),
        "num_speculative_tokens": 3,
        "verify": {"name": "bild", "rollback": 50, "fallback": 0},
    }
    asked = ["diff", "-m", str(pair / "target"), "--speculative-config", json.dumps(config)]
    done = CliRunner().invoke(app, [*asked, "--max-tokens", "12", "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert (report["ok"], report["rule"], report["lossless"]) == (False, "bild", False)
    assert {found["mode"] for found in report["differences"]} == {"greedy"}
    said = CliRunner().invoke(app, [*asked, "--max-tokens", "12"]).output
    assert "verify=bild is lossy by declaration" in said
    assert "BUG" not in said


def test_more_rows_than_usual_are_had(monkeypatch: pytest.MonkeyPatch, pair: Path) -> None:
    given: list[dict[str, Any]] = []

    def load(*_: Any, **named: Any) -> Any:
        given.append(named)
        raise ConfigError("enough.")

    monkeypatch.setattr("outpace.cli.audit.load_llm", load)
    CliRunner().invoke(app, ["model", *models(pair), "--rows", "17"])
    assert given == [{"texts": 17, "rows": 17}]


def test_options_do_not_call_what_does_not_exist_refused() -> None:
    for flag, name, meant in (("--rule", "tokn", "token"), ("--drafter", "ngrm", "ngram")):
        done = CliRunner().invoke(app, ["options", flag, name])
        assert isinstance(done.exception, ConfigError)
        assert f"did you mean '{meant}'" in str(done.exception)


def test_options_prints_proofs_and_refusals() -> None:
    asked = ["options", "--drafter", "draft_tree", "--rule", "token", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert {cell["state"] for cell in json.loads(done.stdout)["cells"]} == {"refused"}


def test_distribution_is_the_enumeration() -> None:
    done = CliRunner().invoke(app, ["distributions", "--rule", "match"])
    assert done.exit_code == 0, done.output
    assert "exact" in done.output


def test_mistakes_are_named(pair: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    wrong = (["--alpha", "2"], ["--prompts", str(empty)], ["--temperature", "0"], ["--chat"])
    for options in wrong:
        done = CliRunner().invoke(app, ["model", *models(pair), "--samples", "4", *options])
        assert done.exit_code != 0
        assert type(done.exception).__name__ in ("ConfigError", "PromptError", "ParamsError")


@pytest.mark.parametrize("line", ["5", "null", '"prompt"', "[" * 100_000, "{}", '{"prompt": 3}'])
def test_a_line_without_a_prompt_is_told(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(PromptError, match=r"line 1 is not JSON|line 1 has no"):
        prompts_in(str(file))


def test_a_json_file_may_be_an_array(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('[{"prompt": "a"},\n {"prompt_token_ids": [3]}]')
    assert prompts_in(str(file)) == ["a", [3]]


def test_a_rule_that_was_not_enumerated_has_not_passed() -> None:
    words = ["distributions", "--rule", "token", "--rule", "kseq", "--drafter", "without"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("kseq takes none of the ways of drafting")
