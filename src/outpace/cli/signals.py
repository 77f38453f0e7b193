"""Ctrl-C and SIGTERM: an answer that stops and is kept, and commands that keep what they have."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
        # asyncio's own handler of Ctrl-C cancels the main task. An exception that is raised between
        # two steps of the loop may lose a task that was about to be woken, and then nothing ends.
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    try:
        with handled_by(stop, signal.SIGTERM):
            yield
    except (KeyboardInterrupt, typer.Exit):  # the second: who has reported it already
        if came:
            raise typer.Exit(TERMINATED) from None
        raise


class Interrupts:
    """Counts Ctrl-C: the first asks an answer to stop after its present round, so that the
    conversation stays cached; the second interrupts whatever is being computed."""

    def __init__(self) -> None:
        self._count = 0

    def requested(self) -> bool:
        """Whether Ctrl-C came since `listening` began."""
        return self._count > 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Counts while the block runs; the second Ctrl-C raises ``KeyboardInterrupt`` in it."""
        self._count = 0
        with handled_by(self._interrupt):
            yield

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Lets Ctrl-C do nothing while the block runs. Between an answer and the next prompt, where the
    line editor sets itself up, it would do harm; at the prompt it is a key like others."""
    with handled_by(signal.SIG_IGN):
        yield


@contextmanager
def handled_by(handler: Any, number: int = signal.SIGINT) -> Iterator[None]:
    """Lets a function, or one of signal's own, handle Ctrl-C, or another signal, while the block
    runs."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def typed_ahead_kept() -> Iterator[None]:
    """Sees to it that Ctrl-C keeps what is typed while the block runs, for the next prompt: a
    terminal drops it by itself."""
    try:
        import termios
    except ImportError:  # no such terminals on this system
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    terminal, local_flags = sys.stdin.fileno(), 3
    before = termios.tcgetattr(terminal)
    changed = [*before]
    changed[local_flags] |= termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
