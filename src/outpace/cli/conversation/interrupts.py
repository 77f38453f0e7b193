"""What Ctrl-C means while a line is obeyed: the answer stops, and nothing that was typed goes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

READ_AT_ONCE = 128
"""Prompt tokens that are read between two looks at whether Ctrl-C was pressed: some seconds of a
large model on a slow machine."""


class Interrupts:
    """Counts Ctrl-C: the first asks an answer to stop after its present round, so that the
    conversation stays cached; the second interrupts whatever is being computed."""

    def __init__(self) -> None:
        self._count = 0

    def wanted(self) -> bool:
        """Whether Ctrl-C came since `heard` began."""
        return self._count > 0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listens while the block runs; the second Ctrl-C raises ``KeyboardInterrupt`` in it."""
        self._count = 0
        with _handled_by(self._interrupt):
            yield

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt


@contextmanager
def ignored() -> Iterator[None]:
    """Lets Ctrl-C do nothing while the block runs. Between an answer and the next prompt, where the
    line editor sets itself up, it would do harm; at the prompt it is a key like others."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
