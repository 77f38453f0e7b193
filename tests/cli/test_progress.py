"""Signs of life on a terminal, before the seconds that importing torch takes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from processes import START_SECONDS, killed_after
from representatives import representatives

Run = Callable[..., Any]

SCRIPT = """
import os, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(2, b"IMPORTING TORCH")
            os._exit(0)

sys.meta_path.insert(0, Stop())
from outpace.cli.main import run
run()
"""


@pytest.mark.parametrize(
    "verb",
    representatives(
        [
            ["generate", "a prompt"],
            ["chat", "--no-history"],
            ["bench", "run"],
            ["bench", "cost"],
            ["bench", "pair", "make", "--out", "unused"],
            ["datastore", "build", "a.txt", "--out", "unused"],
            ["audit", "distributions"],
            ["audit", "model"],
            ["audit", "diff"],
            ["audit", "options"],
            ["audit", "families"],
        ],
        (
            ["generate", "a prompt"],
            ["chat", "--no-history"],
            ["bench", "run"],
            ["audit", "distributions"],
        ),
    ),
    ids=" ".join,
)
def test_a_terminal_shows_something_before_torch_is_imported(verb: list[str]) -> None:
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *verb], stderr=terminal, stdin=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    with killed_after(START_SECONDS, process):
        with suppress(OSError):  # the end of a terminal that nobody holds any more
            while part := os.read(master, 1 << 16):
                shown += part
        assert process.wait() == 0
    os.close(master)
    before, found, _ = shown.decode().partition("IMPORTING TORCH")
    assert found, "the verb never imported torch"
    assert "starting" in before


def test_threads_reach_the_engine_when_given(
    generate: Run, monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    given: list[dict[str, Any]] = []

    def llm(model: str, **arguments: Any) -> None:
        given.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr("outpace.llm.LLM", llm)
    generate("w1", "--threads", 3, "--trust-remote-code")
    generate("w1")
    assert [arguments.get("threads") for arguments in given] == [3, None]
    assert [arguments["trust_remote_code"] for arguments in given] == [True, False]
