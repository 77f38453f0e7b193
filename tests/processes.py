"""Processes that tests start: none of them may run for ever."""

from __future__ import annotations

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


def python(script: str, *words: object) -> list[str]:
    """Returns the command of a process that runs a script as ``python -c`` does."""
    return [sys.executable, "-c", script, *map(str, words)]
