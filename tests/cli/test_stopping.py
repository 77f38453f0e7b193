"""Long verbs without a terminal: they say how far they are, and SIGTERM leaves what they have."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from outpace.cli.signals import sigterm_as_ctrl_c
from processes import START_SECONDS, killed_after, python

SLOW = """
import time
from outpace.bench.roofline import read_bandwidth
from outpace.cli import progress
from outpace.engine.engine import Engine
progress.EVERY = 0.1
read_bandwidth.__defaults__ = 8, 1
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.02), step(engine))[1]
from outpace.cli.main import run
run()
"""
"""Makes rounds take long enough for a signal to come between them, and reads little memory."""

Run = Callable[..., Any]


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    with (
        subprocess.Popen(
            python(SLOW, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as process,
        killed_after(START_SECONDS, process),
    ):
        yield process


def terminated(process: subprocess.Popen[str], line: str) -> tuple[str, str]:
    """Sends SIGTERM once a line of standard error matches; returns all that was written."""
    assert process.stderr is not None
    seen = ""
    while not re.search(line, seen):
        new = process.stderr.readline()
        assert new, f"no {line!r} in {seen!r}"
        seen += new
    process.send_signal(signal.SIGTERM)
    text, errors = process.communicate()
    return text, seen + errors


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"w{n} w{n + 1} w{n + 2} w{n + 3}\n" for n in range(40)))
    return file


def test_audit_diff_says_how_far_it_is_and_leaves_what_it_compared(
    target: Path, drafter: Path, prompts: Path
) -> None:
    flags = ("-m", target, "--draft", drafter, "-k", 2, "--prompts", prompts, "--json")
    with started("audit", "diff", *flags) as process:
        text, errors = terminated(process, "greedy, compared")
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    report = json.loads(text)
    # 40 prompts and their first tokens, in two modes.
    assert report["stopped_of"] == 160
    assert 0 < report["texts"]["greedy"] + report["texts"]["coupled"] < 160
    assert report["tokens"]["greedy"] > 0
    assert report["drafted"]["greedy"] > 0
    assert re.search(r"audit diff: \d+ of 560 steps \(.*\), \d+ s so far, about .* left", errors)


def test_audit_model_says_how_far_it_is_and_leaves_what_it_tested(
    target: Path, drafter: Path, prompts: Path
) -> None:
    flags = ("-m", target, "--draft", drafter, "-k", 2, "--prompts", prompts, "--rows", 2)
    with started("audit", "model", *flags) as process:
        text, errors = terminated(process, r"audit model: 1 of 125 steps .8 texts.")
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert re.search(r"Stopped: this is what \d+ of 1000 texts show", text)
    assert "tokens were drafted" in text


def test_bench_run_says_how_far_it_is_and_writes_what_it_measured(
    target: Path, drafter: Path, prompts: Path, tmp_path: Path
) -> None:
    records = [json.dumps({"prompt": line}) for line in prompts.read_text().splitlines()]
    file, found = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    file.write_text("\n".join(records))
    flags = ("--model", target, "--draft", drafter, "-k", 2, "--prompts", file)
    with started("bench", "run", *flags, "--max-tokens", 24, "--json", found) as process:
        text, errors = terminated(process, r"bench run: 6 of 82 steps \((plain|draft_model)\)")
    assert process.returncode == 128 + signal.SIGTERM, errors
    cell = json.loads(found.read_text())["cells"][0]
    assert cell["stopped_of"] == 40
    assert 1 <= cell["prompts"] < 40
    assert "(stopped, of 40)" in " ".join(text.split())
    assert "about" in errors


def test_a_second_sigterm_is_not_caught() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    @sigterm_as_ctrl_c()
    def verb() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)  # to this thread, which runs it at once
        except KeyboardInterrupt:
            handlers.append(signal.getsignal(signal.SIGTERM))
            raise

    with pytest.raises(typer.Exit) as raised:
        verb()
    assert raised.value.exit_code == 143
    assert handlers == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_cancels_in_an_event_loop() -> None:
    seen: list[str] = []

    async def answer() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            seen.append("went on to its next step")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    @sigterm_as_ctrl_c()
    def verb() -> None:
        try:
            asyncio.run(answer())
        except KeyboardInterrupt:
            seen.append("interrupted")
            raise

    with pytest.raises(typer.Exit) as raised:
        verb()
    assert raised.value.exit_code == 143
    assert seen == ["went on to its next step", "cancelled", "interrupted"]
