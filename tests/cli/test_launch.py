"""How `outpace train` finds out that it is one of several processes, and what it refuses then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outpace.arguments import EngineArgs
from outpace.cli.flags.groups import ModelFlags
from outpace.cli.train.launch import Launch
from outpace.core.options import options_of
from outpace.errors import ConfigError

Run = Callable[..., Any]
SECOND = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second of two. Nobody answers where the other one would be."""
    for name, value in SECOND.items():
        monkeypatch.setenv(name, value)


def test_the_environment_says_which_process_it_is() -> None:
    for count in ("1", ""):
        assert Launch.of({}) == Launch.of({**SECOND, "WORLD_SIZE": count}) == Launch()
    found = Launch.of({**SECOND, "LOCAL_RANK": "0"})
    assert found == Launch(number=1, count=2, local=0)
    assert (found.ranks.number, found.ranks.count) == (1, 2)
    assert found.console().quiet
    assert not Launch(number=0, count=2).console().quiet


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RANK": None}, "WORLD_SIZE=2, which asks for several processes, and no RANK"),
        ({"MASTER_PORT": None}, "and no MASTER_PORT: start them with torchrun"),
        ({"LOCAL_RANK": "x"}, "unset WORLD_SIZE"),
        ({"MASTER_PORT": "abc"}, "unset WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({"WORLD_SIZE": "many"}, "unset WORLD_SIZE"),
        ({"RANK": "2"}, "RANK=2, which is none of WORLD_SIZE=2 processes"),
    ],
)
def test_half_an_environment_is_refused(change: dict[str, str | None], sentence: str) -> None:
    changed = {name: value for name, value in {**SECOND, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=sentence):
        Launch.of(changed)


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(
    ("method", "flags", "sentence"),
    [
        ("medusa", ("--batch", "3"), "2 processes cannot share 3."),
        (
            "medusa",
            ("--hidden-states", "{out}/states"),
            "share it out: leave it out, or start outpace",
        ),
        ("draft_model", ("--online",), "share it out: start outpace train without torchrun."),
        ("judge", (), "judge weighs the tokens of a whole step"),
        ("medusa", ("--device", "cuda:0"), "cuda:0 is one GPU for several processes"),
        ("medusa", ("--shard-target", "--quantization", "int8"), "leave one of the two out"),
        ("draft_model", ("--shard-target",), "add --start with a folder, or --start random"),
        ("medusa", ("--shard-target", "-m", "hub/name:file.gguf"), "name:file.gguf is a GGUF file"),
        ("medusa", ("--shard-target", "--hidden-states", "{out}/states"), "leave it out, or start"),
    ],
)
def test_what_one_process_does_alone_is_refused_by_each(
    run: Run, target: Path, tmp_path: Path, method: str, flags: tuple[str, ...], sentence: str
) -> None:
    """Before it waits for another one."""
    out = tmp_path / "out"
    named = [flag.format(out=tmp_path) for flag in flags]
    done = run("train", method, "-m", str(target), "--data", "text.txt", "--out", str(out), *named)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


def test_a_process_alone_has_nothing_to_split(run: Run, target: Path, tmp_path: Path) -> None:
    asked = ("-m", str(target), "--data", "text.txt", "--out", str(tmp_path / "out"))
    done = run("train", "medusa", *asked, "--shard-target")
    assert done.exit_code == 2
    assert "and this is the only one: start it with torchrun" in " ".join(done.stderr.split())


def test_only_several_processes_have_a_device_of_their_own() -> None:
    defaults = {one.name: one.default for one in options_of(EngineArgs)}
    usual = {one.name: defaults[one.name] for one in fields(ModelFlags)}
    flags = ModelFlags(**{**usual, "device": "cuda"})
    assert Launch().placed(flags) is flags
    cpu = ModelFlags(**{**usual, "device": "cpu"})
    assert Launch(number=1, count=2, local=1).placed(cpu) == cpu


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "code"), [(2, 0), (3, 1)])
def test_torchrun_starts_it(target: Path, tmp_path: Path, batch: int, code: int) -> None:
    """torchrun itself ends with 1 where a process ends with anything but 0, and says what."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("w1 w2 w3 w4 " * 40)
    asked = ("-m", str(target), "--data", str(text), "--out", str(out))
    how = ("--steps", "2", "--every", "1", "--block", "16", "--batch", str(batch))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, "-m", "outpace", "train", "medusa", *asked, *how],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("use it: --method medusa") == (code == 0)
    assert ("exitcode  : 2" in done.stderr) == (code == 1)
    assert (out / "model.safetensors").exists() == (code == 0)
