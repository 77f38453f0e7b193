"""What only a real process shows: Ctrl-C, broken pipes, piped prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout

from outpace.cli.train.launch import LOCK
from outpace.train.checkpoint import LOG, STATE
from processes import START_SECONDS, killed_after, python

# A parent that ignores SIGINT (as background jobs of a shell do) would hand that down.
SCRIPT = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from outpace.cli.main import run; run()"
)


SPEW = """
import typer

def spew():
    while True:
        typer.echo("text", nl=False)
"""


@contextmanager
def start(
    *arguments: object, stdin: int = subprocess.DEVNULL, script: str = SCRIPT, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    with (
        subprocess.Popen(
            python(script, *arguments),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        ) as process,
        killed_after(START_SECONDS, process),
    ):
        yield process


def long_text(target: Path, drafter: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    flags = ("--max-tokens", 8000, "--ignore-eos", "--temperature", 1)
    return start("generate", "w1 w2", "-m", target, "--draft", drafter, *flags)


def test_ctrl_c_keeps_what_was_written(target: Path, drafter: Path) -> None:
    with long_text(target, drafter) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    text = (first + rest).decode()
    assert process.returncode == 130, errors.decode()
    assert text.endswith("\n")
    assert 1 < len(text.split()) < 8000
    assert b"Traceback" not in errors
    assert b"interrupted; " in errors
    assert b"target passes" in errors


def training(
    target: Path, text: Path, out: Path, *more: object
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    sizes = ("--set", "layers=1", "--start", "random", "--block", 16, "--batch", 2)
    steps = ("--steps", 40, "--every", 5, "--threads", 1)
    asked = ("train", "draft_model", "-m", target, "--data", text, "--out", out)
    return start(*asked, *sizes, *steps, *more)


def test_a_killed_training_goes_on_and_ends_as_one_that_was_not(
    target: Path, tmp_path: Path
) -> None:
    text, cut, whole = tmp_path / "text.txt", tmp_path / "cut", tmp_path / "whole"
    text.write_text(" ".join(f"w{number * number % 89}" for number in range(640)))
    with training(target, text, cut) as killed:
        while killed.poll() is None and not ((cut / LOG).exists() and (cut / LOG).stat().st_size):
            time.sleep(0.005)
        with pytest.raises(Timeout):
            FileLock(cut / LOCK, timeout=0).acquire()
        killed.kill()
        killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert 5 <= torch.load(cut / STATE, weights_only=True)["step"] < 40
    errors = {}
    for out in (cut, whole):
        with training(target, text, out) as process:
            errors[out] = process.communicate()[1].decode()
        assert process.returncode == 0, errors[out]
    assert "going on from step" in errors[cut]
    assert "going on from step" not in errors[whole]
    names = {file.name for file in whole.iterdir()}
    assert {file.name for file in cut.iterdir()} == names
    for name in names - {STATE, LOG}:  # these hold times
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    states = [torch.load(out / STATE, weights_only=True) for out in (cut, whole)]
    for one, other in zip(*(numbers(state) for state in states), strict=True):
        assert torch.equal(one, other)


def test_a_training_that_is_terminated_says_what_is_kept(target: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(" ".join(f"w{number * number % 89}" for number in range(640)))
    with training(target, text, out, "--steps", 100_000) as process:
        while process.poll() is None and not ((out / LOG).exists() and (out / LOG).stat().st_size):
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1].decode()
    assert process.returncode == 128 + signal.SIGTERM, errors
    step = torch.load(out / STATE, weights_only=True)["step"]
    said = " ".join(errors.split())
    assert "interrupted; kept is step " in said
    assert f"in {out}. The same command goes on from step {step:,}." in said
    assert "Traceback" not in errors


def test_texts_are_kept_at_sigterm_and_what_was_learned_of_them(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    """The first of two texts ends soon, since its prompt leaves little room."""
    prompts, state = tmp_path / "prompts.jsonl", tmp_path / "state.json"
    lines = [{"prompt": "w3 " * 8100}, {"prompt": "w1 w2"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.dumps({"method": "auto", "model": str(drafter), "state": str(state)})
    flags = ("--prompt-file", prompts, "--max-tokens", 8000, "--ignore-eos", "--temperature", 1)
    with start("generate", "-m", target, "--speculative-config", config, *flags) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1].decode()
    assert first
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert json.loads(state.read_text())["state"].keys() == {"savings", "drafters"}


def numbers(state: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the weights of a run, and what its optimizer knows of each."""
    known = state["optimizer"]["state"].values()
    return [*state["network"].values(), *(value for one in known for value in one.values())]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "spew.py").write_text(SPEW)
    script = f"from outpace.cli import main; main.VERBS['spew'] = 'spew:spew'; {SCRIPT}"
    with start("spew", script=script, PYTHONPATH=str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == b"text"
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 1
    assert errors == b""


def test_an_empty_pipe_is_an_empty_prompt() -> None:
    with start("generate", stdin=subprocess.PIPE) as process:
        text, errors = process.communicate(b"")
    assert (process.returncode, text) == (2, b"")
    assert errors == b"outpace: standard input is empty: give some text to continue.\n"
