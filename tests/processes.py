"""Processes that tests start: none of them may run for ever."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


def free_port() -> int:
    """Returns a port on which nobody listens, of those that systems do not give out by themselves:
    one of these may be somebody's connection by the time that it is used. The generator is of its
    own, so that tests which run side by side under one seed ask for different ports."""
    draws = random.SystemRandom()
    while True:
        port = draws.randrange(20_000, 32_000)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port


def python(script: str, *words: object) -> list[str]:
    """Returns the command of a process that runs a script as ``python -c`` does."""
    return [sys.executable, "-c", script, *map(str, words)]
