"""Processes that tests start: none of them may run for ever."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

START_SECONDS = 300
"""Seconds that a process has that only imports the library and says something: more than enough
on a machine whose processors others use, too."""


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kills a process that still runs after n seconds, whatever the block waits for: what it
    reads ends then, and the test fails. Also kills one that still runs after the block."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()
        assert not late.is_set(), f"the process was killed: it ran longer than {seconds} seconds"


def python(script: str, *words: object) -> list[str]:
    """Returns the command of a process that runs a script as ``python -c`` does, but begins with
    the library imported. For scripts that nothing can tell from others by what they import."""
    program = [sys.executable, "-S", "-E", str(FORKS), "ask", _forking()]
    return [*program, script, *map(str, words)]


FORKS = Path(__file__).parent / "forks.py"


@cache
def _forking() -> str:
    """Starts the process that forks, which ends with this one; returns the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    path = str(Path(folder.name) / "socket")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, str(FORKS), str(listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            env=environment,
        )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return path
