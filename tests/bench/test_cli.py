"""The verbs: what they print and write, and that mistakes are one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bench.reports import answered
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner, Result

from outpace.bench import contest, roofline
from outpace.bench.builtin import CHATS
from outpace.bench.contest import BatchJob, OutpaceContestant, run_interleaved
from outpace.bench.peers import hf as hf_peer
from outpace.bench.peers.registry import Models, peers
from outpace.bench.prompts import read_prompts, read_sets
from outpace.bench.results import Report
from outpace.bench.session import Engines, _models, lineup, named_methods
from outpace.bench.synthetic import Pair
from outpace.cli import bench as outpace_cli_bench
from outpace.cli.bench import app
from outpace.cli.bench_flags import ContestFlags, DraftFlags
from outpace.draft.registry import drafter_names
from outpace.errors import ConfigError, OutpaceError
from outpace.llm import BUNDLED, LLM
from outpace.targets.hf.loading.load import load
from targets.gguf.files import tiny, write


def outpace(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_writes_everything_it_is_asked_for(pair: Pair, tmp_path: Path) -> None:
    done = outpace(
        "run", "--model", pair.target, "--draft", pair.drafter, "-k", "2", "--again",
        "--vs", "hf,hf,hf-assisted", "--num-prompts", "2", "--max-prompt-tokens", "8",
        "--max-tokens", "24", "--sweep", "1,2",
        "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"),
        "--png", str(tmp_path / "png"), "--markdown", str(tmp_path / "r.md"),
        "--spec-bench", str(tmp_path / "answers"),
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "batch 1, temperature 0: 2 prompts, 24 new tokens each" in done.output
    report = Report.from_json((tmp_path / "r.json").read_text())
    methods = {m.name: m for m in report.cells[0].methods}
    assert list(methods)[:3] == ["plain", "plain again", "draft_model"]
    for name, found in methods.items():
        if name != "plain":
            assert found.identity is not None
            assert found.identity.identical == 2, name
    ours = methods["draft_model"]
    assert ours.prediction is not None
    assert ours.roof is not None
    assert ours.split is not None
    assert set(ours.over_peers) == {name for name in methods if name.startswith("hf")}
    assert report.cells[0].sweep is not None
    assert [p.k for p in report.cells[0].sweep.points] == [1, 2]
    assert (tmp_path / "r.html").read_text().count("data:image/png") == 5
    assert len(list((tmp_path / "png").iterdir())) == 5
    assert "| draft_model |" in (tmp_path / "r.md").read_text()
    answers = answered(tmp_path / "answers" / "draft_model-b1-t0.jsonl")
    assert [a["new_tokens"] for a in answers] == [[24], [24]]
    assert all(sum(a["accept_lengths"]) == 24 for a in answers)
    assert all(a["decoding_steps"] == [len(a["accept_lengths"])] for a in answers)
    others = answered(tmp_path / "answers" / "hf-assisted-5-b1-t0.jsonl")
    assert [a["new_tokens"] for a in others] == [[24], [24]]
    untold = [(a["accept_lengths"], a["decoding_steps"]) for a in others]
    assert untold == [([], []), ([], [])], "transformers does not tell its passes"


def test_draft_lengths_are_compared_with_an_engine_without_a_drafter(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[list[str]] = []

    def timing(contestants: Any, *rest: Any) -> Any:
        compared.append([one.llm.config.method for one in contestants])
        return run_interleaved(contestants, *rest)

    monkeypatch.setattr("outpace.bench.setting.run_interleaved", timing)
    done = outpace(
        "run", "--model", pair.target, "--draft", pair.drafter, "-k", "2", "--num-prompts", "1",
        "--max-prompt-tokens", "8", "--max-tokens", "8", "--sweep", "1,2",
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert compared[-1] == ["none", "draft_model", "draft_model"]


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        (8, ["2 prompts (stopped, of 4)"]),
        (13, ["4 prompts"]),  # in the first job of the second setting
        (16, ["4 prompts", "2 prompts (stopped, of 4)"]),
        (-14, ["4 prompts (stopped after them)"]),  # while draft lengths are compared
    ],
)
def test_a_run_that_is_stopped_writes_what_it_has(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int, found: list[str]
) -> None:
    timed, timing = 0, contest._timed

    def until_stopped(*given: Any) -> Any:
        nonlocal timed
        if timed == abs(runs):
            raise KeyboardInterrupt
        timed += 1
        return timing(*given)

    monkeypatch.setattr(contest, "_timed", until_stopped)
    done = outpace(
        "run", "--model", pair.target, "--draft", pair.drafter, "-k", "2", "--again",
        "--num-prompts", "4", "--max-prompt-tokens", "8", "--max-tokens", "24", "--batch", "1,2",
        "--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md"),
        *(["--sweep", "1,2"] if runs < 0 else []),
    )  # fmt: skip
    assert done.exit_code == 130, (done.output, done.exception)
    report = Report.from_json((tmp_path / "r.json").read_text())
    assert [cell.texts for cell in report.cells] == found
    for cell in report.cells:
        assert [method.name for method in cell.methods] == ["plain", "plain again", "draft_model"]
        assert all(method.speedup for method in cell.methods[1:])
        assert cell.texts in done.output
        assert cell.texts in (tmp_path / "r.md").read_text()


def test_a_run_that_is_stopped_at_once_writes_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(contest, "_timed", stopped)
    done = outpace(
        "run", "--model", pair.target, "--draft", pair.drafter, "-k", "2", "--num-prompts", "2",
        "--max-prompt-tokens", "8", "--max-tokens", "8", "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert done.exit_code == 130
    assert not (tmp_path / "r.json").exists()


def test_texts_end_where_the_target_ends_them(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([5, 1])
    monkeypatch.setattr("outpace.bench.contest.OutpaceContestant.length", lambda *_: next(lengths))
    done = outpace(
        "run", "--model", pair.target, "--draft", pair.drafter, "-k", "2", "--num-prompts", "2",
        "--max-prompt-tokens", "8", "--max-tokens", "24", "--to-end", "--temperature", "0.8",
        "--spec-bench", str(tmp_path / "answers"),
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "at most 24 new tokens each, to the end of the text" in " ".join(done.output.split())
    answers = answered(tmp_path / "answers" / "draft_model-b1-t0.8.jsonl")
    assert sorted(a["new_tokens"] for a in answers) == [[2], [5]]


def test_the_target_says_where_its_texts_end(pair: Pair) -> None:
    model = load(pair.target).model
    job = BatchJob(((1, 2, 3), (4, 5)), max_tokens=12, temperature=0.0)
    whole = OutpaceContestant(LLM(model), "plain", "off").run(job).texts
    model.generation_config.eos_token_id = whole[0][6]
    ends = [text.index(whole[0][6]) + 1 if whole[0][6] in text else 12 for text in whole]
    assert min(ends) < 12
    plain = OutpaceContestant(LLM(model), "plain", "off")
    assert plain.length(job) == max(ends)
    assert plain.length(replace(job, prompts=job.prompts[:1])) == ends[0]
    assert plain.run(job).texts == whole


def test_a_text_alone_ends_by_itself_and_nobody_is_told_where(pair: Pair) -> None:
    """A controller that knew the end would leave out what cannot be repaid before it."""
    model = load(pair.target).model
    job = BatchJob(((1, 2, 3),), max_tokens=12, temperature=0.0)
    (whole,) = OutpaceContestant(LLM(model), "plain", "off").run(job).texts
    model.generation_config.eos_token_id = whole[6]
    length = whole.index(whole[6]) + 1
    ours = OutpaceContestant(LLM(model, speculative_config={"method": "ngram"}), "ngram")
    ended = replace(job, max_tokens=length, most=12)
    assert ours.run(ended).texts == [whole[:length]]
    assert {params.max_tokens for params in ours._params(ended)} == {12}


def test_several_methods_by_name_over_one_target(pair: Pair, tmp_path: Path) -> None:
    done = outpace(
        "run", "--model", pair.target, "--draft", pair.drafter, "-k", "2", "--prompts", "builtin",
        "--methods", "ngram,draft_model", "--num-prompts", "4", "--max-prompt-tokens", "8",
        "--max-tokens", "8",
        "--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md"),
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    report = Report.from_json((tmp_path / "r.json").read_text())
    names = [m.name for m in report.cells[0].methods]
    assert [name.split()[0] for name in names] == ["plain", "ngram", "draft_model"]
    tasks = [task.task for task in report.cells[0].methods[0].tasks]
    assert len(tasks) > 1
    assert len(tasks) > len(names) - 1, "the longer list makes the rows"
    page = (tmp_path / "r.md").read_text()
    assert "| task | ngram" in page
    assert all(f"| {task} | " in page for task in tasks)


def test_methods_add_rows_to_those_of_configurations() -> None:
    tree = '{"method": "suffix", "num_speculative_tokens": 7}'
    flags = ContestFlags(config=[tree], methods="ngram,draft_model", draft="a/name")
    assert flags.named(bundled=False).configs == (
        {"method": "suffix", "num_speculative_tokens": 7},
        {"method": "ngram"},
        {"method": "draft_model", "model": "a/name"},
    )


def test_all_methods_are_those_that_need_no_more_than_what_is_given() -> None:
    alone = named_methods(["all"], {})
    assert "needs 'model'" in alone.left_out["draft_model"]
    paired = named_methods(["all"], {"model": "a/name", "num_speculative_tokens": 3})
    assert {
        "method": "draft_model",
        "model": "a/name",
        "num_speculative_tokens": 3,
    } in paired.configs
    assert {"method": "suffix", "num_speculative_tokens": 3} in paired.configs
    assert "'datastore'" in paired.left_out["retrieval"]
    assert not {"none", "medusa"} & {config["method"] for config in paired.configs}
    assert set(drafter_names()) == {
        "none", *paired.left_out, *(config["method"] for config in paired.configs)
    }  # fmt: skip


def test_the_bundled_target_brings_its_heads() -> None:
    configs = named_methods(["all"], {}, BUNDLED).configs
    assert {"method": "eagle3", "model": str(BUNDLED / "heads/eagle3")} in configs


def test_what_the_model_refuses_is_left_out_unless_it_was_named() -> None:
    engines = Engines(None, ({"method": "ngram"}, {"method": "mtp"}), {}, all_required=False)
    taking_part = lineup(engines, 1)
    assert [one.name for one in taking_part.contestants] == ["plain", "ngram"]
    assert "no multi-token-prediction module" in taking_part.left_out["mtp"]
    with pytest.raises(OutpaceError, match="no multi-token-prediction module"):
        lineup(replace(engines, all_required=True), 1)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--methods", "ngrm"], "did you mean 'ngram'"),
        (["--methods", "retrieval"], "needs 'datastore'"),
        (["--methods", "ngram", "--method", "suffix"], "exclude each other"),
    ],
)
def test_methods_that_cannot_be_run(pair: Pair, flags: list[str], reason: str) -> None:
    done = outpace("run", "--model", pair.target, *flags)
    assert reason in str(done.exception)


def test_several_prompt_sets_with_commas(tmp_path: Path) -> None:
    both = read_sets("builtin, editing")
    assert both == [*read_prompts("builtin"), *read_prompts("editing")]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "x"}\n{"prompt": "x", "id": "again"}')
    two.write_text('{"prompt": "y"}\n{"prompt": "x"}')
    assert [prompt.text for prompt in read_sets(f"{one},{two}")] == ["x", "y"], "each prompt once"
    odd = tmp_path / "a,b.jsonl"
    odd.write_text('{"prompt": "x"}\n{"prompt": "x"}')
    assert [prompt.text for prompt in read_sets(str(odd))] == ["x"]


def test_a_mixture_of_experts_is_run_without_a_bound(pair: Pair, tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    tokens = json.loads((target / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=tokens, **sizes, **heads)
    MixtralForCausalLM(config).save_pretrained(target)
    wanted = ["run", "--model", str(target), "--method", "ngram", "--num-prompts", "1"]
    done = outpace(*wanted, "--max-tokens", "4", "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 0, (done.output, done.exception)
    report = Report.from_json((tmp_path / "r.json").read_text())
    assert report.bandwidth is not None
    assert [method.roof for method in report.cells[0].methods] == [None, None]


def test_an_encoder_decoder_is_run_without_the_times_of_its_parts(
    pair: Pair, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    tokens = json.loads((target / "config.json").read_text())["vocab_size"]
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=tokens, **sizes, decoder_start_token_id=0, eos_token_id=None)
    T5ForConditionalGeneration(config).save_pretrained(target)
    wanted = ["run", "--model", str(target), "--method", "ngram", "--num-prompts", "1"]
    done = outpace(*wanted, "--max-tokens", "4", "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 0, (done.output, done.exception)
    report = Report.from_json((tmp_path / "r.json").read_text())
    plain, ngram = report.cells[0].methods
    assert [plain.roof, ngram.roof, ngram.prediction] == [None] * 3
    assert ngram.identity is not None
    assert ngram.identity.identical == 1
    costs = outpace("cost", "--model", str(target), "--method", "ngram")
    assert "is an encoder-decoder, whose rounds' parts cannot be timed" in str(costs.exception)


def test_a_model_with_states_reads_no_cache_that_grows() -> None:
    """Mamba's configuration knows no attention heads."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    found = roofline.traffic_of(MambaForCausalLM(MambaConfig(**sizes)), 4)
    assert found.per_cached_token == 0
    assert found.of_pass(1, 1000) == found.weights > 0


def test_chats_are_given_through_the_template(pair: Pair, tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    (target / "chat_template.jinja").write_text("<{{ messages[0]['content'] }}>")
    wanted = ["run", "--model", str(target), "--draft", pair.drafter, "--prompts", "chat", "--chat"]
    wanted += ["--num-prompts", "2", "--max-tokens", "4", "--json", str(tmp_path / "r.json")]
    done = outpace(*wanted, "--verbose")
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"{target} on cpu" in done.output  # by --verbose: how the models are computed
    report = Report.from_json((tmp_path / "r.json").read_text())
    tokenizer = load(str(target)).tokenizer
    first_two = [text for _, task, text in CHATS if task != "text"][::3]
    lengths = [len(tokenizer(f"<{text}>").input_ids) for text in first_two]
    assert report.cells[0].prompt_tokens == sum(lengths) / 2
    assert report.provenance["chat template"] == "applied"
    short = outpace(*wanted, "--max-prompt-tokens", "20")
    assert "a chat cannot be cut to 20" in str(short.exception)


def test_ten_chats_come_with_the_package() -> None:
    assert len(CHATS) == 10
    assert {task for _, task, _ in CHATS} == {"code", "maths", "text"}
    assert [prompt.text for prompt in read_prompts("chat")] == [text for *_, text in CHATS]


def test_cost_prints_and_writes_its_curves(pair: Pair, tmp_path: Path) -> None:
    done = outpace(
        "cost", "--model", pair.target, "--draft", pair.drafter, "--batch", "1,2", "--context",
        "16", "--longest", "2", "--repeats", "1", "--json", str(tmp_path / "c.json"),
        "--html", str(tmp_path / "c.html"),
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "batch 2, context 16" in done.output
    curves = json.loads((tmp_path / "c.json").read_text())["curves"]
    assert [[n for n, _ in curve["verify"]] for curve in curves] == [[1, 2, 3], [1, 2, 3]]
    assert [k for k, _ in curves[0]["draft"]] == [1, 2]


def test_what_was_measured_is_written_before_anything_is_shown(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the output may have left, as ``head`` does."""

    def left(*_: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(outpace_cli_bench, "table", left)
    given = ("--model", pair.target, "--draft", pair.drafter, "--json")
    cost = ("--context", "8", "--longest", "1", "--repeats", "1")
    run = ("--num-prompts", "2", "--max-prompt-tokens", "8", "--max-tokens", "8", "-k", "1")
    for verb, flags in (("cost", cost), ("run", run)):
        file = tmp_path / f"{verb}.json"
        done = outpace(verb, *given, str(file), *flags)
        assert done.exit_code == 1, done.output
        assert json.loads(file.read_text())


def test_costs_are_those_of_the_draft_model_where_no_method_is_named() -> None:
    (alone,) = DraftFlags(draft="small").for_costs().configs(bundled=False)
    assert alone == {"method": "draft_model", "model": "small"}
    (named,) = DraftFlags(draft="small", method="draft_tree").for_costs().configs(bundled=False)
    assert named["method"] == "draft_tree"


def test_a_missing_peer_is_named_with_its_remedy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(ConfigError, match=r"needs openvino_genai: pip install 'outpace\[peers\]'"):
        peers(["plain", "openvino"], Models(pair.target, pair.drafter, "float32", "cpu"))


def test_a_peer_that_needs_a_draft_model_is_given_no_head() -> None:
    words = ["--method", "eagle3", "--num-prompts", "1", "--max-tokens", "2"]
    done = outpace("run", *words, "--vs", "hf-assisted")
    assert isinstance(done.exception, ConfigError)
    assert "holds a trained head: leave 'hf-assisted' out of --vs" in str(done.exception)


def test_transformers_reads_gguf_files_too(tmp_path: Path) -> None:
    target = write(tmp_path / "target.gguf", "qwen2", tiny("qwen2"), "Q8_0")
    drafter = write(tmp_path / "drafter.gguf", "llama", tiny("llama"), "Q8_0")
    models = Models(str(target), str(drafter), "float32", "cpu")
    found = peers(["hf", "hf-assisted-3"], models)
    assert [c.name for c in found] == ["hf", "hf-assisted-3"]
    every = [c.name for c in peers(["hf-assisted", "hf-assisted-3", "hf", "hf-assisted"], models)]
    assert len(every) == len(set(every)) == 5, "each way takes part once"
    plain, assisted = (c.run(BatchJob(((3, 1, 4),), 6, 0.0)).texts for c in found)
    assert [len(text) for text in plain] == [6]
    assert plain == assisted


def test_peers_are_given_the_files_that_names_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("alone/big.gguf", "model/config.json", "hub/small.gguf"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"GGUF")
    cached = str(tmp_path / "hub" / "small.gguf")
    monkeypatch.setattr("outpace.targets.hf.loading.source._downloaded_file", lambda *_: cached)

    def given(target: Path, drafter: str | Path) -> Models:
        config = SimpleNamespace(options={"model": drafter})
        loaded = SimpleNamespace(name=str(target), dtype=torch.float32, device="cpu")
        return _models(Engines(None, (), {}), SimpleNamespace(target=loaded, config=config))  # type: ignore[arg-type]

    found = given(tmp_path / "alone", "organisation/name:small.gguf")
    assert (found.target, found.drafter) == (str(tmp_path / "alone" / "big.gguf"), cached)
    found = given(tmp_path / "model", BUNDLED / "heads" / "eagle3")
    assert (found.target, found.drafter) == (str(tmp_path / "model"), None)
    assert found.head == str(BUNDLED / "heads" / "eagle3")


def test_an_unknown_peer_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.bench.session.LLM", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="unknown peer 'hg'"):
        lineup(Engines(None, (), {}, vs=("plain", "hg")), 1)


def test_a_peer_rounds_weights_and_no_angles(tmp_path: Path) -> None:
    """Positions are angles: rounded to 8 bits, those of late tokens would be others."""
    path = write(tmp_path / "m.gguf", "llama", tiny("llama"), "Q8_0")
    (peer,) = hf_peer.plain(Models(str(path), None, "auto", "cpu"), [""])
    model: Any = peer._model
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("whose", ["quantization", "drafter_quantization"])
def test_a_peer_that_does_not_quantise_is_refused(pair: Pair, whose: str) -> None:
    models = Models(pair.target, pair.drafter, "float32", "cpu", **{whose: "int8"})
    with pytest.raises(ConfigError, match="leave 'hf' out of --vs"):
        peers(["hf"], models)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--model", "TARGET", "--vs", "hg"], "unknown peer 'hg'"),
        (["run", "--model", "TARGET", "--vs", "hf-assisted"], "needs a draft model"),
        (["run", "--model", "TARGET", "--vs", "llama.cpp"], "unknown peer 'llama.cpp'"),
        (["run", "--model", "TARGET", "--again", "--chat"], "leave --chat out"),
        (["run", "--prompts", "gsm9k"], "did you mean 'gsm8k'"),
        (["run", "--batch", "x"], "--batch must be numbers"),
        (["run", "--batch", ","], "--batch must be numbers"),
        (["serve", "--clients", " "], "--clients must be numbers"),
        (["run", "--model", "TARGET", "--again", "--batch", "99"], "at least that many prompts"),
        (["run", "--model", "TARGET", "--again", "--llm", "[]"], "JSON object"),
        (["run", "--model", "TARGET", "--again", "--llm", '{"colour": 1}'], "colour"),
        (["run", "--again", "--llm", '{"max_nm_seqs": 1}'], "did you mean 'max_num_seqs'"),
        (["run", "--again", "--llm", '{"model": "x"}'], "give --model"),
        (["run", "--again", "--llm", '{"dtype": "float32"}'], "give --dtype"),
        (["serve", "--url", "http://127.0.0.1:1/v1"], "give the part up to '127.0.0.1:1'"),
        (["run", "--again", "--llm", '{"enable_prefix_caching": true}'], "leave it out"),
        (
            ["run", "--again", "--batch", "2", "--llm", '{"max_num_seqs": 1}'],
            "max_num_seqs in --llm allows 1",
        ),
        (["cost", "--model", "TARGET", "--context", "9999"], "leaves no room"),
        (
            ["cost", *["--speculative-config", '{"method": "ngram"}'] * 2],
            "2 were given: give --speculative-config once",
        ),
        (["pair", "make", "--out", "x", "--shape", "bench-100m"], "did you mean 'bench-200m'"),
    ],
)
def test_mistakes_are_one_sentence(pair: Pair, arguments: list[str], message: str) -> None:
    done = outpace(*[pair.target if a == "TARGET" else a for a in arguments])
    assert isinstance(done.exception, OutpaceError)
    assert message in str(done.exception)
    assert str(done.exception).count("\n") == 0
