"""SIGTERM for commands that keep what they have when they are stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells give for a process that SIGTERM ended."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Lets SIGTERM stop the block as Ctrl-C does, so that it writes what it has found, and then
    ends with exit code 143. A second one ends the process at once. Also a decorator."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return
    came = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, typer.Exit):  # the second: who has told of it already
        if came:
            raise typer.Exit(TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
