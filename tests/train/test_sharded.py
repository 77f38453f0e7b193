"""Processes that split the target among them make the drafter that one makes with all of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from cli.conftest import WORDS, save_model
from outpace.cli.main import app
from outpace.errors import UnsupportedModel
from outpace.targets.hf.loading.load import load, load_plain
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.distributed import _check, is_sharded
from train import two_ranks

SIZES = ("--batch", "4", "--block", "24", "--every", "2", "--steps", "4", "--set", "depths=3")
OWN = ("--self-distill", "--answers", "12", "--answer-tokens", "40", "--prompt-tokens", "6")
METHODS = {
    "medusa": ("target",),
    "pass": ("tied",),  # gradients go through the target
    "draft_model": ("target", *OWN, "--start", "random", "--set", "layers=1"),
}
"""Those that use the target in different ways: for each the target and more flags."""


def asked(folder: Path, out: str, method: str) -> list[str]:
    target, *more = METHODS[method]
    read = ("-m", str(folder / target), "--data", str(folder / "text.txt"))
    return ["train", method, *read, *SIZES, *more, "--out", str(folder / out / method)]


def save_tied(target: Path, folder: Path) -> None:
    """Writes the same model with its embedding table as its output matrix."""
    shutil.copytree(target, folder)
    model = LlamaForCausalLM.from_pretrained(target)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafters for `METHODS` that one process has made, "one", and two with ``--shard-target``,
    "two"."""
    made = tmp_path_factory.mktemp("sharded")
    save_model(made / "target", WORDS, seed=0)
    save_tied(made / "target", made / "tied")
    two_ranks.write_text(made / "text.txt")
    with pytest.MonkeyPatch.context() as patch:
        # What is split are plain layers: our own would round otherwise.
        patch.setattr(load, "__kwdefaults__", {**(load.__kwdefaults__ or {}), "cpu_kernels": "off"})
        for method in METHODS:
            done = CliRunner().invoke(app, asked(made, "one", method))
            assert done.exit_code == 0, done.stderr
    (made / "two" / "draft_model").mkdir(parents=True)
    shutil.copy(made / "one" / "draft_model" / "answers.jsonl", made / "two" / "draft_model")
    commands = {method: asked(made, "two", method) for method in METHODS}
    unwritten = [*commands["medusa"][:-1], str(made / "unwritten"), *OWN]
    broken = [*commands["medusa"][:-1], str(made / "broken")]
    commands |= {"unwritten": unwritten, two_ranks.BROKEN: broken}
    sharded = {name: [*flags, "--shard-target"] for name, flags in commands.items()}
    two_ranks.run_both(made, sharded)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_a_target_that_is_split_teaches_what_a_whole_one_teaches(method: str, folder: Path) -> None:
    """Also where a process has no held-out block to read, and some tokens are not learned from."""
    assert two_ranks.said_by(0, folder)[method][0] == 0, two_ranks.said_by(0, folder)[method][1]
    assert two_ranks.said_by(1, folder)[method] == [0, ""]
    mine, theirs = (
        load_file(folder / out / method / "model.safetensors") for out in ("one", "two")
    )
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6, msg=name)


def test_each_process_holds_half_of_the_layers_and_the_whole_of_what_is_read_beside_them(
    folder: Path,
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "target")
    beside = 2 * model.lm_head.weight.numel()
    split = sum(weight.numel() for weight in model.parameters()) - beside
    for rank in range(two_ranks.COUNT):
        held = two_ranks.said_by(rank, folder)["held"]
        assert held == {
            "medusa": beside + split // 2,
            "pass": beside // 2 + split // 2,
            "draft_model": beside + split // 2,
            "unwritten": beside + split // 2,
            two_ranks.BROKEN: beside + split // 2,
        }


def test_answers_are_written_by_a_target_that_is_whole(folder: Path) -> None:
    for rank in range(two_ranks.COUNT):
        code, words = two_ranks.said_by(rank, folder)["unwritten"]
        assert code == 2
        assert "with --shard-target none has the whole target" in " ".join(words.split())


def test_a_process_that_fails_ends_the_others(folder: Path) -> None:
    """Also those that wait for it within the target."""
    code, words = two_ranks.said_by(0, folder)[two_ranks.BROKEN]
    assert (code, "No space left" in words) == (2, True)
    code, words = two_ranks.said_by(1, folder)[two_ranks.BROKEN]
    assert (code, "cannot reach the others that train with it" in words) == (2, True)


def test_layers_that_cannot_be_split_are_refused(folder: Path) -> None:
    kinds: dict[str, Any] = {"dtype": "auto", "device": "cpu", "trust_remote_code": False}
    loaded = load_plain(str(folder / "target"), progress=lambda step, done: None, **kinds)
    assert not is_sharded(loaded)
    layer = nn.Linear(2, 2)
    _check(loaded, [layer, nn.Linear(2, 2)])
    with pytest.raises(UnsupportedModel, match="share their weights"):
        _check(loaded, [layer, nn.Sequential(layer)])
    with pytest.raises(UnsupportedModel, match="are quantised"):
        _check(LoadedModel(loaded.model, None, "x", packed=True), [layer])
    whole = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModel, match="are quantised"):
        _check(loaded, [nn.ParameterList([whole])])
