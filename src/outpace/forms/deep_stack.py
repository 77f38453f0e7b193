"""Work that goes down along what a client wrote, in a thread with room for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK = 512 << 20
"""Bytes of stack with which a grammar is compiled; what is not used takes no memory. llguidance
goes down along references, and a chain of thousands would end the process with the usual stack."""

LONGEST = 1 << 20
"""Characters of a form at most: n fit into that stack, whatever they say."""

Made = TypeVar("Made")

_starting = threading.Lock()
"""The size of a new thread's stack is the process's."""


def with_deep_stack(work: Callable[[], Made]) -> Made:
    """Returns what a function makes, or raises its error, in a thread of its own."""
    done: Future[Made] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="outpace-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()
