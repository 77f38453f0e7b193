"""``outpace train``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError

from outpace.cli.train.launch import LOCK
from outpace.methods.choosers.classifier import TaskClassifier
from outpace.train.run import TrainingRun

Run = Callable[..., Any]
SHORT = ("--steps", "2", "--every", "1", "--batch", "1", "--block", "16")


def test_a_drafter_from_the_targets_own_answers(run: Run, target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3\n<|endoftext|>\nw4 w5")
    own = ("--self-distill", "--data", str(prompts), "--answers", "6", "--answer-tokens", "20")
    out = str(tmp_path / "small")
    asked = ("train", "draft_model", "-m", str(target), *own, "--out", out, "--set", "depths=2")
    done = run(*asked, *SHORT)
    assert done.exit_code == 0, done.stderr
    assert "acceptance length" in done.stderr
    written = (Path(out) / "answers.jsonl").read_text()
    assert written.count("\n") == 7
    again = run(*asked, *SHORT[2:], "--steps", "3")
    assert "going on from step 2" in again.stderr
    assert (Path(out) / "answers.jsonl").read_text() == written
    used = run("generate", "w1 w2", "-m", str(target), "--draft", out, "-k", "2", "--json")
    assert used.exit_code == 0, used.stderr


def test_a_head_from_a_text(run: Run, target: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 20)
    out = str(tmp_path / "head")
    done = run("train", "medusa", "-m", str(target), "--data", str(text), "--out", out, *SHORT)
    assert done.exit_code == 0, done.stderr
    assert f"--method medusa --draft {out}" in done.stderr


def test_the_figure_at_the_end_is_that_of_the_weights_that_are_kept(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([2.5, 1.25, 1.0])
    monkeypatch.setattr("outpace.train.metrics.AcceptanceLength.score", lambda *_: next(scores))
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", str(target), "--data", str(text), "--out", str(out))
    for _ in range(2):  # the second time there is nothing left to do
        said = " ".join(run(*asked, *SHORT).stderr.split())
        assert "minutes; kept is step 1: simulated acceptance length 2.50, by depth" in said


def test_the_text_is_read_once_for_several_heads(run: Run, target: Path, tmp_path: Path) -> None:
    text, kept = tmp_path / "text.txt", tmp_path / "states"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("-m", str(target), "--data", str(text), "--hidden-states", str(kept), *SHORT)
    seen = []
    for method in ("medusa", "mlp_speculator"):
        done = run("train", method, *asked, "--out", str(tmp_path / method))
        assert done.exit_code == 0, done.stderr
        seen.append({file.name: file.stat().st_mtime_ns for file in kept.glob("*.states")})
    assert seen[0]
    assert seen[0] == seen[1]
    full = run("train", "hydra", *asked, "--out", str(tmp_path / "c"), "--cache", "1e-9")
    assert "the kept hidden states fill --cache" in full.stderr


def two_tasks(folder: Path) -> tuple[str, ...]:
    """Writes a text for each of two tasks, and returns the flags that name them."""
    sums, tales = folder / "sums.jsonl", folder / "tales.txt"
    lines = [{"prompt": f"w1 w2 w{n}", "response": "w3 w4 " * 9} for n in range(3, 9)]
    sums.write_text("\n".join(map(json.dumps, lines)))
    tales.write_text("\n<|endoftext|>\n".join(f"w{n} " + "w20 w21 w22 " * 9 for n in range(20, 26)))
    return "--for", f"sums={sums}", "--for", f"tales={tales}"


def test_a_drafter_for_each_task(run: Run, target: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "heads", tmp_path / "curves.png"
    own = ("--self-distill", "--answer-tokens", "20")
    asked = ("train", "medusa", "-m", str(target), *two_tasks(tmp_path), *own, *SHORT)
    done = run(*asked, "--out", str(out), "--png", str(png))
    assert done.exit_code == 0, done.stderr
    assert "of 12 prompts recognised" in done.stderr
    assert f"use them: --speculative-config {out / 'routes.json'}" in done.stderr
    for task in ("sums", "tales"):
        assert {"config.json", "answers.jsonl"} <= {file.name for file in (out / task).iterdir()}
    assert png.read_bytes().startswith(b"\x89PNG")
    config = json.loads((out / "routes.json").read_text())
    assert config["routes"]["tales"] == {"method": "medusa", "model": str(out / "tales")}
    router = TaskClassifier.load(config["router"])
    assert router.tasks == ("sums", "tales")
    assert router.task_of("w24 w20 w21 w22 w20 w21")[0] == "tales"
    for task in config["routes"].values():
        task["check"] = False  # they have hardly learned anything
    (out / "routes.json").write_text(json.dumps(config))
    asked = ("generate", "w24 w20 w21", "-m", str(target), "--json", "--method")
    plain = run(*asked, "none")
    used = run(*asked[:-1], "--speculative-config", str(out / "routes.json"))
    assert used.exit_code == 0, used.stderr
    assert json.loads(used.stdout)["text"] == json.loads(plain.stdout)["text"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w1\n<|endoftext|>\nw2", "--for short: the training text has"),
        ("w1 " * 12 + "\n<|endoftext|>\n" + "w2 " * 8, "--for short: 1 block(s) of text are"),
    ],
)
def test_all_texts_are_read_before_a_drafter_learns(
    run: Run, target: Path, tmp_path: Path, text: str, words: str
) -> None:
    sums, short = tmp_path / "sums.txt", tmp_path / "short.txt"
    sums.write_text("\n<|endoftext|>\n".join("w3 w4 " * 20 for _ in range(4)))
    short.write_text(text)
    texts = ("--for", f"sums={sums}", "--for", f"short={short}")
    done = run("train", "medusa", "-m", str(target), *texts, *SHORT, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "out" / "sums" / "training.jsonl").exists(), "no time was spent on it"


@pytest.mark.parametrize(
    ("method", "flags", "words"),
    [
        ("medusa", ("--for", "sums"), "--for must be TASK=FILE"),
        ("medusa", ("--for", "../sums=a.txt"), "its drafter's folder has its name"),
        ("medusa", ("--for", "router.npz=a.txt"), "a file in the drafters' folder has that name"),
        ("medusa", ("--for", "sums=a.txt"), "two tasks or more"),
        ("medusa", ("--for", "a=a.txt", "--data", "b.txt"), "--for and --data exclude"),
        ("medusa", ("--for", "a=a.txt", "--online"), "--for and --online exclude"),
        ("judge", ("--for", "a=a.txt", "--for", "b=b.txt"), "judge is none"),
        ("medusa", ("--for", "a=a.txt", "--for", "b=b.txt"), "cannot read training file 'a.txt'"),
    ],
)
def test_tasks_that_cannot_be_trained_for(
    run: Run, target: Path, tmp_path: Path, method: str, flags: tuple[str, ...], words: str
) -> None:
    done = run("train", method, "-m", str(target), *flags, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


def test_curves_go_on_with_the_run(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []

    def draw(found: Any, measure: str) -> bytes:
        assert measure == "acceptance_length"
        drawn.append([report["tokens"] for report in found["medusa"]])
        return b""

    monkeypatch.setattr("outpace.bench.plots.training_figure", draw)
    text, png = tmp_path / "text.txt", tmp_path / "made" / "curves.png"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", str(target), "--data", str(text), "--png", str(png))
    asked = (*asked, "--out", str(tmp_path / "head"), *SHORT[2:], "--steps")
    assert run(*asked, "2").exit_code == 0
    assert drawn[-1] == [16, 32]
    with (tmp_path / "head" / "training.jsonl").open("a") as log:
        log.write('1\n{"step": 3, "lo')  # and was killed
    assert run(*asked, "3").exit_code == 0
    assert drawn[-1] == [16, 32, 48]
    refused = run(*asked[:-1], "--png", str(tmp_path))
    assert refused.exit_code == 2
    assert "--png: cannot write" in " ".join(refused.stderr.split())


def test_a_run_that_was_killed_before_it_had_a_state_begins_anew(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out, whole = tmp_path / "text.txt", tmp_path / "head", tmp_path / "whole"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", str(target), "--data", str(text), *SHORT, "--out")
    assert run(*asked, str(whole)).exit_code == 0

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", killed)
        assert run(*asked, str(out)).exit_code != 0
    assert (out / "model.safetensors").exists()
    assert not (out / "training.pt").exists()
    done = run(*asked, str(out))
    assert done.exit_code == 0, done.stderr
    assert bytes_of(out)["model.safetensors"] == bytes_of(whole)["model.safetensors"]


def test_a_drafter_whose_state_is_gone_is_not_overwritten(
    run: Run, target: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", str(target), "--data", str(text), *SHORT, "--out", str(out))
    assert run(*asked).exit_code == 0
    (out / "training.pt").unlink()
    before = bytes_of(out)
    refused = run(*asked)
    assert refused.exit_code == 2
    assert "holds a model" in refused.stderr
    assert bytes_of(out) == before


def test_curves_that_cannot_be_drawn_end_no_training(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> bytes:
        raise OSError("No space left on device")

    monkeypatch.setattr("outpace.bench.plots.training_figure", full)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", str(target), "--data", str(text), *SHORT)
    done = run(*asked, "--out", str(tmp_path / "head"), "--png", str(tmp_path / "curves.png"))
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("No space left") == 1, "it is said once"


def test_a_classifier_of_a_draft_models_tokens(
    run: Run, target: Path, drafter: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", str(tmp_path / "stop")
    text.write_text("w1 w2 w3 w4 " * 40)
    asked = ("-m", str(target), "--data", str(text), "--out", out, "--draft", str(drafter), *SHORT)
    done = run("train", "stop_head", *asked, "--set", "every=2")
    assert done.exit_code == 0, done.stderr
    assert "balanced accuracy" in done.stderr
    assert f'"length": {{"name": "stop_head", "head": "{out}"}}' in done.stderr
    refused = run("train", "medusa", *asked)
    assert "--draft is for judge and stop_head" in " ".join(refused.stderr.split())
    kept = run("train", "stop_head", *asked, "--hidden-states", str(tmp_path / "states"))
    assert "--hidden-states is for drafters" in " ".join(kept.stderr.split())


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Returns what the files of a folder hold."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("method", "flags", "flag"),
    [
        ("medusa", ("-m", "{copy}", "--out", "{copy}/."), "-m"),
        ("draft_model", ("-m", "{target}", "--start", "{copy}", "--out", "{copy}"), "--start"),
        ("stop_head", ("-m", "{target}", "--draft", "{copy}", "--out", "{copy}"), "--draft"),
        (
            "draft_model",
            ("-m", "{target}", "--online", "--start", "{copy}", "--out", "{copy}"),
            "--start",
        ),
    ],
)
def test_no_model_that_is_read_is_overwritten(
    run: Run, target: Path, copy_of_target: Path, method: str, flags: tuple[str, ...], flag: str
) -> None:
    before = bytes_of(copy_of_target)
    named = [one.format(target=target, copy=copy_of_target) for one in flags]
    done = run("train", method, *named, "--data", "missing.txt")
    assert done.exit_code == 2
    assert f"--out is the folder of {flag}, whose model" in " ".join(done.stderr.split())
    assert bytes_of(copy_of_target) == before


@pytest.mark.parametrize("name", ["training.jsonl", "answers.jsonl"])
def test_text_is_not_written_over(run: Run, target: Path, tmp_path: Path, name: str) -> None:
    data = tmp_path / name
    data.write_text(json.dumps({"prompt": "my only one"}) + "\n")
    asked = ("train", "medusa", "-m", str(target), "--data", str(data), "--out", str(tmp_path))
    done = run(*asked, "--self-distill")
    assert done.exit_code == 2
    assert f"holds {name}, which is to be read" in " ".join(done.stderr.split())
    assert data.read_text() == json.dumps({"prompt": "my only one"}) + "\n"


def test_answers_that_are_somebody_elses_stay(run: Run, target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("w1 w2 w3")
    out.mkdir()
    (out / "answers.jsonl").write_text('{"prompt": "mine"}\n')
    asked = ("train", "medusa", "-m", str(target), "--data", str(prompts), "--out", str(out))
    done = run(*asked, "--self-distill", "--answers", "2", "--answer-tokens", "4")
    assert done.exit_code == 2, done.stderr
    assert (out / "answers.jsonl").read_text() == '{"prompt": "mine"}\n'


def test_a_drafter_that_learns_online_overwrites_no_run(
    run: Run, target: Path, copy_of_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "training.pt"):
        (out / name).write_text("{}")
    asked = ("train", "draft_model", "-m", str(target), "--data", "missing.txt", "--out", str(out))
    done = run(*asked, "--online", "--start", str(copy_of_target))
    assert done.exit_code == 2
    assert "holds a model (config.json)" in " ".join(done.stderr.split())


def test_no_other_model_is_overwritten(
    run: Run, target: Path, copy_of_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("train", "medusa", "-m", str(target), "--data", "missing.txt")
    for name in ("config.json", "model.safetensors", "model-Q4_0.gguf"):
        out.mkdir()
        (out / name).write_text("{}")
        done = run(*asked, "--out", str(out))
        assert done.exit_code == 2
        assert f"holds a model ({name}), and no run" in " ".join(done.stderr.split())
        (out / name).rename(out / "answers.jsonl")  # what may be there before the first report
        assert "cannot read training file 'missing.txt'" in run(*asked, "--out", str(out)).stderr
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (("--data", "{text}"), "out"),
        (("--data", "{text}", "--self-distill", "--answers", "2"), "out"),
        (("--for", "a={text}", "--for", "b={text}"), "out/b"),
        (("--for", "a={text}", "--for", "b={text}"), "out"),
        (("--data", "{text}", "--online", "--start", "{target}"), "out"),
    ],
)
def test_a_folder_in_which_another_command_trains_is_refused(
    run: Run, target: Path, tmp_path: Path, flags: tuple[str, ...], folder: str
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("w1 w2 w3 w4 " * 20)
    held = tmp_path / folder
    held.mkdir(parents=True)
    asked = [flag.format(text=text, target=target) for flag in flags]
    with FileLock(held / LOCK):
        done = run("train", "draft_model", "-m", target, *asked, "--out", out)
        assert done.exit_code == 2
        said = " ".join(done.stderr.split())
        assert said.endswith(
            f"outpace: --out: another outpace train is writing into {held}: wait until it has "
            "ended, or name another folder."
        )
        assert {file.name for file in out.rglob("*") if file.is_file()} == {LOCK}
    done = run("train", "medusa", "-m", target, "--data", text, "--out", out, *SHORT)
    assert done.exit_code == 0, "it is free when that command has ended"


def test_a_full_disk_ends_in_one_sentence(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("outpace.heads.folder.save_file", full_disk)
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    done = run("train", "medusa", "-m", str(target), "--data", str(text), "--out", str(out), *SHORT)
    assert done.exit_code == 2
    assert done.stderr.strip().endswith(
        "outpace: a file cannot be written (No space left on device (os error 28)); make room on "
        f"its disk, or name another folder: '{out}/model.safetensors'."
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "there is nothing to learn from"),
        (("--data", "x.txt", "--answers", "3"), "--answers needs --self-distill"),
        (("--self-distill", "--cache", "6"), "--cache must be above 0 and at most 5 GB"),
        (("--self-distill", "--answer-tokens", "0"), "--answer-tokens must be at least 1"),
        (("--self-distill", "--start", "random"), "--start random is for draft_model"),
        (("--self-distill", "--start", "nowhere"), "nowhere"),
        (("--self-distill", "--loss", "tv"), "--loss is for draft_model"),
        (("--self-distill", "--set", "depths"), "--set takes NAME=N"),
        (("--self-distill", "--set", "depths=\u00b2"), "--set takes NAME=N"),
        (("--self-distill", "--set", "deep=3"), "no size 'deep'"),
        (("--self-distill", "--every", "0"), "--every must be at least 1, not 0"),
        (("--self-distill", "--minutes", "nan"), "--minutes must be more than 0, not nan"),
        (("--self-distill", "--temperature", "0"), "would be the same again"),
        (("--self-distill", "--out", __file__), "--out: cannot write into"),
    ],
)
def test_mistakes_end_in_one_sentence(
    run: Run, target: Path, tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    done = run("train", "medusa", "-m", str(target), "--out", str(tmp_path / "out"), *flags)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


def test_a_start_that_is_none_is_named_beside_a_run_too(
    run: Run, target: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", target, "--data", text, *SHORT, "--out")
    assert run(*asked, out).exit_code == 0
    assert run(*asked, tmp_path / "other").exit_code == 0
    gone = run(*asked, out, "--start", tmp_path / "nowhere")
    assert gone.exit_code == 2
    assert "nowhere" in gone.stderr
    assert "another" not in gone.stderr
    sized = run(*asked, out, "--start", tmp_path / "other", "--set", "depths=2")
    assert "depths cannot be set" in " ".join(sized.stderr.split())
    differs = run(*asked, out, "--start", tmp_path / "other")
    assert "holds a run with another start" in " ".join(differs.stderr.split())


def test_a_run_that_is_beyond_the_asked_steps_says_so(
    run: Run, target: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", target, "--data", text, "--out", out, *SHORT[2:], "--steps")
    assert run(*asked, "2").exit_code == 0
    again = run(*asked, "1")
    assert again.exit_code == 0
    said = " ".join(again.stderr.split())
    assert "this run is at step 2, beyond --steps 1: nothing more is learned" in said
    assert "going on" not in said
    assert "2/1" not in said


@pytest.mark.parametrize("every", ["1", "3"])
def test_an_interrupted_run_says_what_is_kept(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str
) -> None:
    learn = TrainingRun.learn

    def interrupted(self: TrainingRun, step: int) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return learn(self, step)

    monkeypatch.setattr(TrainingRun, "learn", interrupted)
    text, out = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("train", "medusa", "-m", target, "--data", text, "--out", out, *SHORT[4:])
    done = run(*asked, "--steps", "4", "--every", every)
    assert done.exit_code == 130
    said = " ".join(done.stderr.split())
    if every == "3":
        assert "interrupted before the first report: nothing is kept" in said
    else:
        assert "interrupted; kept is step " in said
        assert f"in {out}. The same command goes on from step 2." in said


def test_the_choice_of_layers_is_said_without_a_terminal(
    run: Run, target: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 20)
    asked = ("--data", text, "--out", tmp_path / "small", "--set", "layers=1", *SHORT)
    done = run("train", "draft_model", "-m", target, *asked)
    assert done.exit_code == 0, done.stderr
    assert "preparing draft_model: which layers to keep (0%)" in done.stderr
    assert "preparing draft_model: which layers to keep (100%)" in done.stderr


def test_an_unknown_drafter_is_refused_with_all_that_there_are(run: Run, tmp_path: Path) -> None:
    done = run("train", "nothing", "--data", "x.txt", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert said.startswith("outpace: unknown drafter 'nothing' (choose from ")
    assert all(name in said for name in ("draft_model", "eagle3", "judge", "stop_head"))


def test_a_drafter_learns_in_service(run: Run, target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", str(tmp_path / "newer")
    prompts.write_text("w1 w2 w3\n<|endoftext|>\nw4 w5")
    asked = ("train", "draft_model", "-m", str(target), "--online", "--data", str(prompts))
    how = ("--start", str(target), "--answer-tokens", "30", "--answers", "4")
    done = run(*asked, *how, "--learner", "optimistic", "--out", out)
    assert done.exit_code == 0, done.stderr
    used = run("generate", "w1 w2", "-m", str(target), "--draft", out, "-k", "2", "--json")
    assert used.exit_code == 0, used.stderr


def test_what_was_learned_in_service_survives_a_failure(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outpace import LLM

    prompts, out = tmp_path / "prompts.txt", tmp_path / "newer"
    prompts.write_text("w1 w2 w3\n<|endoftext|>\nw4 w5")
    generate, calls = LLM.generate, iter(range(9))

    def failing(self: LLM, *given: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return generate(self, *given, **options)

    monkeypatch.setattr(LLM, "generate", failing)
    asked = ("train", "draft_model", "-m", str(target), "--online", "--data", str(prompts))
    how = ("--start", str(target), "--answer-tokens", "30", "--answers", "4", "--out", str(out))
    done = run(*asked, *how)
    assert isinstance(done.exception, RuntimeError)
    assert "what was learned from 2 answers is kept" in done.stderr
    assert (out / "config.json").exists()


@pytest.mark.parametrize("way", [("--self-distill",), ("--online", "--start", "{target}")])
def test_a_prompt_without_room_is_named_before_anything_is_answered(
    run: Run, target: Path, tmp_path: Path, way: tuple[str, ...]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new"
    long = " ".join(["w1"] * 60_000)
    lines = [{"prompt": "w1 w2"}, {"prompt": long}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [flag.format(target=target) for flag in way]
    done = run(
        "train", "draft_model", "-m", str(target), *flags, "--data", str(prompts), "--out", str(out)
    )
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert f"{prompts}, line 2: the prompt has 60,000 tokens, and " in said
    assert "with its answer: shorten it, or leave it out" in said
    assert not (out / "answers.jsonl").exists()


def test_the_runs_of_all_tasks_go_on_without_what_they_began_as(
    run: Run, target: Path, tmp_path: Path
) -> None:
    text, start = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("w1 w2 w3 w4 " * 20)
    run("train", "medusa", "-m", str(target), "--data", str(text), "--out", str(start), *SHORT)
    asked = ("train", "medusa", "-m", str(target), *two_tasks(tmp_path), "--start", str(start))
    given = (*asked, "--out", str(tmp_path / "heads"))
    assert run(*given, *SHORT).exit_code == 0
    shutil.rmtree(start)
    again = run(*given, *SHORT[2:], "--steps", "3")
    assert again.exit_code == 0, again.stderr
    assert again.stderr.count("going on from step 2") == 2


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("hydra", "--start", "{none}"), "there is no folder"),
        (("hydra", "--start", "{head}"), "is of the kind 'medusa': train that kind"),
        (("medusa", "--start", "{head}", "--set", "depths=2"), "depths cannot be set"),
        (("draft_model", "--start", "{none}"), "{none}"),
        (("eagle3", "--set", "heads=5", "--set", "groups=2"), "no head of these sizes"),
        (("eagle3", "--block", "5"), "--block must be more than 5 tokens"),
        (("eagle3", "--temperature", "-1"), "temperature"),
        (("eagle3", "--block", "50000"), "--block must be at most"),
        (("draft_model", "--set", "layers=3"), "layers is 3, and {target} has 2: ask for fewer"),
        (("draft_model", "--set", "hidden_size=8"), "hidden_size cannot be set"),
        (("draft_model", "--start", "random", "--set", "hidden_size=31"), "shared evenly by"),
        (("draft_model", "--start", "random", "--set", "groups=3"), "of these sizes can be made"),
        (("draft_model", "--start", "{target}", "--set", "layers=3"), "layers is 3, and {target}"),
        (("draft_model", "--start", "{stranger}"), "have different tokenizers"),
        (("draft_model", "--start", "{head}"), "cannot read the config.json of"),
        (("judge", "--draft", "{drafter}", "--set", "window=128"), "--block must be more than 2"),
        (("judge", "--draft", "{stranger}"), "have different tokenizers"),
        (("judge", "--draft", "{none}"), "there is no folder"),
        (("judge", "--draft", "{drafter}", "--drafter-quantization", "int8"), "is never rounded"),
        (("stop_head", "--draft", "{drafter}", "--set", "every=256"), "--block must be more than"),
    ],
)
def test_what_does_not_fit_is_said_before_answers_are_written(
    run: Run,
    target: Path,
    drafter: Path,
    stranger: Path,
    tmp_path: Path,
    asked: tuple[str, ...],
    sentence: str,
) -> None:
    places = {"head": str(tmp_path / "head"), "none": str(tmp_path / "none")}
    places |= {"target": str(target), "drafter": str(drafter), "stranger": str(stranger)}
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 20)
    given = ("-m", str(target), "--data", str(text))
    run("train", "medusa", *given, "--out", places["head"], *SHORT)
    flags = [flag.format(**places) for flag in asked]
    out = tmp_path / "out"
    done = run("train", *flags, *given, "--self-distill", "--out", str(out))
    assert done.exit_code == 2
    assert sentence.format(**places) in " ".join(done.stderr.split())
    assert not (out / "answers.jsonl").exists()


def test_a_run_that_cannot_go_on_is_refused_before_more_answers_are_written(
    run: Run, target: Path, drafter: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "small"
    text.write_text("w1 w2 w3\n<|endoftext|>\nw4 w5")
    asked = ("--data", text, "--self-distill", "--answer-tokens", "20", "--out", out, *SHORT)
    done = run("train", "draft_model", "-m", target, *asked, "--answers", "6")
    assert done.exit_code == 0, done.stderr
    before = bytes_of(out)
    changes = {("--lr", "0.5"): "learning_rate", ("--set", "layers=2"): "size (--set)"}
    for flags, other in changes.items():
        done = run("train", "draft_model", "-m", target, *asked, "--answers", "9", *flags)
        assert done.exit_code == 2
        assert f"holds a run with another {other}: name" in " ".join(done.stderr.split())
        assert bytes_of(out) == before
    (out / "training.pt").write_bytes(b"half of it")
    done = run("train", "draft_model", "-m", target, *asked, "--answers", "9")
    assert "training.pt cannot be read" in " ".join(done.stderr.split())
    assert bytes_of(out)["answers.jsonl"] == before["answers.jsonl"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--online",), "name its folder with --start"),
        (("--online", "--start", "x", "--steps", "3"), "--steps is for training on text"),
        (("--online", "--start", "x", "--seed", "0"), "--seed is for training on text"),
        (("--online", "--start", "x", "--draft", "y"), "--draft is for training on text"),
        (
            ("--online", "--start", "x", "--drafter-quantization", "int4"),
            "--drafter-quantization is for training on text",
        ),
        (("--online", "--self-distill"), "drop --self-distill"),
        (
            ("--online", "--start", "x", "--hidden-states", "y"),
            "--hidden-states is for training on text",
        ),
        (("--self-distill", "--learner", "osd"), "--learner is about --online"),
    ],
)
def test_mistakes_about_online_learning(
    run: Run, target: Path, tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    done = run("train", "medusa", "-m", str(target), "--out", str(tmp_path / "out"), *flags)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
