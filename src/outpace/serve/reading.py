"""Bodies of requests are read in threads: tokenising megabytes takes many seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

LONG = 1 << 16
"""Bytes from which on a body is long: a long prompt, or an image."""
LONG_AT_ONCE = 4
"""Long bodies that are read at once. The others wait without a thread, so that there always is one
for a short body."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class Body:
    """The body of a request."""

    content: Any
    """Its JSON."""
    size: int
    """Its bytes."""


class Reading:
    """Reads bodies, short ones at once."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_AT_ONCE)

    async def __call__(self, read: Callable[[Any], Read], body: Body) -> Read:
        """Returns what a function makes of a body's content."""
        if body.size < LONG:
            return await run_in_threadpool(read, body.content)
        async with self._long:
            return await run_in_threadpool(read, body.content)
