"""Several processes that train one drafter make the steps that one makes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from cli.conftest import WORDS, save_model
from outpace.cli.main import app
from outpace.errors import ConfigError, OutpaceError
from outpace.targets.parallel.load import device_of
from outpace.train.checkpoint import LOG, STATE
from outpace.train.distributed import BUCKET, Ranks, _buckets
from outpace.train.run import TrainingRun
from outpace.train.teacher import TeacherBatch
from processes import free_port
from train import two_ranks
from train.test_run import loaded, settings, text

SIZES = ("--batch", "4", "--block", "24", "--every", "2", "--set", "depths=3")
OWN = ("--self-distill", "--answers", "12", "--answer-tokens", "40", "--prompt-tokens", "6")


def test_processes_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr("outpace.train.distributed.COMING", timedelta(seconds=1))
    alone = Ranks(0, 2).joined("cpu")
    with pytest.raises(OutpaceError, match="not all have come: start them with torchrun"), alone:
        raise AssertionError("one of two cannot go on")


def asked(folder: Path, out: str, steps: int = 4) -> dict[str, list[str]]:
    """The commands, by what is shown with them; each writes to a folder of its own."""
    shared = ("-m", str(folder / "target"), "--data", str(folder / "text.txt"), *SIZES)
    methods = {
        "medusa": (),
        "eagle": (),
        "ctc": OWN,
        "draft_model": (*OWN, "--set", "layers=1"),
    }
    found = {}
    for method, more in methods.items():
        place = ("--steps", str(steps), "--out", str(folder / out / method))
        found[method] = ["train", method, *shared, *more, *place]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have left: a drafter for each of `asked`, and what they have said."""
    made = tmp_path_factory.mktemp("ranks")
    save_model(made / "target", WORDS, seed=0)
    two_ranks.write_text(made / "text.txt")
    commands = asked(made, "two")
    odd = [*commands["medusa"][:-2], "--batch", "3", "--out", str(made / "odd")]
    broken = [*commands["medusa"][:-2], "--out", str(made / "broken")]
    commands |= {"odd": odd, two_ranks.BROKEN: broken}
    two_ranks.run_both(made, commands)
    return made


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@pytest.mark.parametrize("method", ["medusa", "ctc", "draft_model"])
def test_two_processes_make_the_drafter_that_one_makes(method: str, folder: Path) -> None:
    """Also where some tokens are not learned from, and not as many in each process's part."""
    two, one = folder / "two" / method, folder / "one" / method
    one.mkdir(parents=True)
    if (two / "answers.jsonl").exists():
        shutil.copy(two / "answers.jsonl", one)
    done = CliRunner().invoke(app, asked(folder, "one")[method])
    assert done.exit_code == 0, done.stderr
    mine, theirs = weights(one), weights(two)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6, msg=name)
    assert len(reports(two)) == len(reports(one)) == 2
    for report, expected in zip(reports(two), reports(one), strict=True):
        loss = pytest.approx(expected["loss"], rel=1e-5)
        assert report == {**expected, "loss": loss, "seconds": report["seconds"]}


def test_the_first_process_speaks_and_writes_for_all(folder: Path) -> None:
    for method, arguments in asked(folder, "two").items():
        code, words = two_ranks.said_by(0, folder)[method]
        assert code == 0, words
        assert words.count("acceptance length") == 3  # two reports, and what is kept
        assert two_ranks.said_by(1, folder)[method] == [0, ""]
        out = Path(arguments[-1])
        names = {file.name for file in out.iterdir()}
        assert {"config.json", "model.safetensors", LOG, STATE} <= names
        assert not any(name.endswith(".part") for name in names)
    answers = (folder / "two" / "ctc" / "answers.jsonl").read_text()
    assert answers.count("\n") == 13  # of all processes together


def test_a_run_of_two_processes_goes_on_with_one(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "going"
    shutil.copytree(folder / "two" / "medusa", out)
    command = [*asked(folder, "two", steps=6)["medusa"][:-1], str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert "going on from step 4 of 6" in done.stderr
    assert [report["step"] for report in reports(out)] == [2, 4, 6]


def test_blocks_that_cannot_be_shared_out_are_refused_by_all(folder: Path) -> None:
    for rank in range(two_ranks.COUNT):
        code, words = two_ranks.said_by(rank, folder)["odd"]
        assert code == 2
        assert "2 processes cannot share 3." in " ".join(words.split())
    assert not (folder / "odd").exists()


def test_a_process_that_fails_ends_the_others(folder: Path) -> None:
    code, words = two_ranks.said_by(0, folder)[two_ranks.BROKEN]
    assert (code, "No space left" in words) == (2, True)
    code, words = two_ranks.said_by(1, folder)[two_ranks.BROKEN]
    assert (code, "cannot reach the others that train with it" in words) == (2, True)


def test_what_is_found_is_found_by_all(folder: Path) -> None:
    found = two_ranks.said_by(0, folder)["found"]
    assert found == two_ranks.said_by(1, folder)["found"]
    assert found == {
        "gradients": [[0.5] * 6, [2.5]],
        "mean": 0.5,
        "any": [True, False],
        "largest": 2,
        "same": [True, False, False, True],
        "gathered": [[[0, 1]], [[0, 1], [0, 0], [0, 1], [1, 0], [1, 1]]],
    }


def test_one_process_is_given_back_what_it_has() -> None:
    ranks, weight = Ranks.alone(), nn.Parameter(torch.zeros(1))
    with ranks.joined("cpu"):
        ranks.check(3)
        ranks.wait()
        ranks.average([weight])
        ranks.broadcast(nn.Linear(1, 1))
    assert weight.grad is None
    assert not torch.distributed.is_initialized()
    assert (ranks.first, ranks.part(3), ranks.seed(7), ranks.mean(0.5)) == (True, 3, 7, 0.5)
    assert (ranks.any(True), ranks.any(False), ranks.largest([1, 2])) == (True, False, 2)
    assert ranks.same("x")
    assert ranks.same_weights(nn.Linear(1, 1))
    numbers = torch.tensor([4, 1, 3])
    assert torch.equal(ranks.share(numbers), numbers)
    halves = torch.split(torch.tensor([[0.0], [float("nan")], [1.0]]), 2)  # of a classifier
    assert ranks.gathered(halves, ranks.turns(halves)).isnan().tolist() == [
        [False],
        [True],
        [False],
    ]


def test_the_parts_of_a_step_are_its_blocks_each_once() -> None:
    numbers = torch.tensor([5, 2, 9, 4, 7, 1])
    parts = [Ranks(number, 3).share(numbers).tolist() for number in range(3)]
    assert parts == [[5, 2], [9, 4], [7, 1]]
    seeds = {Ranks(number, 3).seed(step) for number in range(3) for step in range(5)}
    assert len(seeds) == 15
    torch.manual_seed(Ranks(4095, 4096).seed((1 << 42) * 1_000_003))  # the largest that there is


def test_a_place_counts_alike_whoever_reads_its_text() -> None:
    tokens, none = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, 0)
    own = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    batch = TeacherBatch(tokens, none, none.long(), none)
    where = torch.tensor([0, 1])
    assert (batch.count(), batch.share(where)) == (8.0, 1.0)
    for some in (replace(batch, learned=own[:2]), batch.of(own[:2]), batch.of(own[:2], own[:2])):
        learned = some.learned
        assert learned is not None
        assert some.count() == int(learned.sum())
        mean = float(learned[:, :2].float().mean())
        assert float(some.share(where)) == pytest.approx(mean, abs=1e-8)
    # After 3, 2, 4 and 4 of four tokens: 6.5 for two texts; after 1, 0, 2 and 2 of the first two.
    shared = batch.of(own[:2], own)
    assert (shared.count(), float(shared.share(where))) == (6.5, 0.625)


def test_gradients_are_averaged_in_groups_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.train.distributed.BUCKET", 5)
    sizes = [3, 2, 1, 9, 2]
    given = [torch.zeros(size) for size in sizes] + [torch.zeros(1, dtype=torch.float64)]
    assert [[each.numel() for each in one] for one in _buckets(given)] == [
        [3, 2],
        [1],
        [9],
        [2],
        [1],
    ]
    assert BUCKET > 1 << 20


def test_a_run_refuses_blocks_that_cannot_be_shared_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 processes cannot share 8"):
        TrainingRun(loaded(), text(), settings("medusa", 1), tmp_path, ranks=Ranks(0, 3))


def test_a_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without any can show it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(asked, 1) for asked in ("auto", "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="more processes on this machine than GPUs"):
        device_of("auto", 2)
    with pytest.raises(ConfigError, match="cuda:1 is one GPU for several processes"):
        device_of("cuda:1", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", 1) == "auto"
