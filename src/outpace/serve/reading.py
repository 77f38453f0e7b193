"""Bodies of requests are read in threads: to tokenise megabytes, or to compile the form that a text
is to have, may take many seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

LONG = 1 << 16
"""Bytes from which on a body is long: a long prompt, or an image."""
LONG_AT_ONCE = 4
"""Long bodies, and such as ask for a form, that are read at once. The others wait without a thread,
so that there always is one for a short body."""

FORMS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
)
"""Fields by which a body asks for a form."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class Body:
    """The body of a request."""

    content: Any
    """Its JSON."""
    size: int
    """Its bytes."""

    @property
    def is_long(self) -> bool:
        """Whether reading it may take long."""
        content = self.content
        asks = isinstance(content, dict) and any(content.get(name) for name in FORMS)
        return self.size >= LONG or asks


class Reading:
    """Reads bodies, short ones at once."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_AT_ONCE)

    async def __call__(self, read: Callable[[Any], Read], body: Body) -> Read:
        """Returns what a function makes of a body's content."""
        if not body.is_long:
            return await run_in_threadpool(read, body.content)
        async with self._long:
            return await run_in_threadpool(read, body.content)
