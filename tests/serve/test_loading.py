"""The command while its model is loaded: whoever asks has an answer at once."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outpace.serve.settings import KEY_VARIABLE
from processes import START_SECONDS, killed_after, python

from .conftest import call, wait_for

WAITING = re.compile(r"loading the bundled pair: reading weights \(\d+%\)")

SLOW = """
import os, time
from pathlib import Path
import outpace.building as building
from outpace.cli import progress as shown

shown.EVERY = 0.1
load = building.load

def slowly(*given, progress, **named):
    progress("reading weights", 0.4)
    while not Path(os.environ["GO_ON"]).exists():
        time.sleep(0.05)
    return load(*given, progress=progress, **named)

building.load = slowly
from outpace.cli.main import run
run()
"""
"""Loads a model as soon as a file is there."""


class Started:
    """The command, what it says, and what lets it go on."""

    def __init__(self, folder: Path) -> None:
        self.log, self.go_on = folder / "log", folder / "go-on"

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"^listening at (\S+): status 503", self.said, re.MULTILINE)
        return found[1] if found else ""

    def ready(self) -> bool:
        try:
            return call(self.url, "/ready")[0] == 200
        except OSError:  # closed by one server before the other one took the port over
            return False


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[tuple[Started, subprocess.Popen[bytes]]]:
    run = Started(folder)
    words = ["serve", "--port", "0", "--threads", "1", "--max-num-seqs", "2", *flags]
    variables = {**os.environ, KEY_VARIABLE: "", "GO_ON": str(run.go_on)}
    with (
        run.log.open("wb") as said,
        subprocess.Popen(python(SLOW, *words), stderr=said, env=variables) as one,
        killed_after(START_SECONDS, one),
    ):
        wait_for(lambda: one.poll() is not None or run.url, START_SECONDS)
        yield run, one


def test_requests_get_503_at_once_until_the_model_is_loaded(tmp_path: Path) -> None:
    with started(tmp_path) as (run, process):
        wait_for(lambda: len(WAITING.findall(run.said)) > 2)
        body = {"prompt": "Once", "max_tokens": 4}
        for path, asked in (("/ready", None), ("/v1/models", None), ("/v1/completions", body)):
            status, answer, headers = call(run.url, path, asked)
            assert (status, answer["error"]["code"]) == (503, "loading")
            assert re.search(r"\(reading weights, \d+%\): try again", answer["error"]["message"])
            assert int(headers["retry-after"]) > 0
            assert headers["connection"] == "close"
        assert call(run.url, "/health")[:2] == (200, {"status": "loading"})
        for _ in range(9):
            call(run.url, "/ready")
        probes = [line for line in run.said.splitlines() if '"/ready"' in line]
        assert len(probes) == 1
        assert '"status": 503' in probes[0]
        host, port = run.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(b"GET /ready HT")  # half a request holds up nobody
            run.go_on.touch()
            wait_for(run.ready, START_SECONDS)
        status, answer, _ = call(run.url, "/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        for _ in range(9):
            for path in ("/health", "/ready", "/metrics"):
                assert call(run.url, path)[0] == 200
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert "Traceback" not in run.said
    lines = run.said.splitlines()
    assert not [line for line in lines if '"/health"' in line or '"/metrics"' in line]
    assert [line for line in lines if '"/v1/completions"' in line and '"status": 200' in line]


def test_sigterm_ends_the_loading(tmp_path: Path) -> None:
    with started(tmp_path) as (run, process):
        wait_for(lambda: "reading weights" in run.said, START_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_what_cannot_be_loaded_ends_in_a_sentence(tmp_path: Path) -> None:
    with started(tmp_path, "-m", str(tmp_path / "nothing")) as (run, process):
        assert process.wait() == 2
    assert "nothing" in run.said.splitlines()[-1]
    assert "Traceback" not in run.said
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(run.url.removeprefix("http://")).connect()
