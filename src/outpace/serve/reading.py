"""Bodies of requests are read in threads: to tokenise megabytes, or to compile the form that a text
is to have, may take many seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from outpace.serve.openai.errors import ApiError

LONG = 1 << 16
"""Bytes from which on a body is long: a long prompt, or an image."""
LONG_AT_ONCE = 4
"""Long bodies, and such as ask for a form, that are read at once. The others wait without a thread,
so that there always is one for a short body."""
WAITING = 64
"""Bodies that may wait so. More are refused: each of them is held in memory."""

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
    """Reads bodies, short ones at once. seconds: how long one may wait for its turn."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._waiting = 0

    async def __call__(
        self, read: Callable[[Any], Read], body: Body, left: Callable[[], Awaitable[None]]
    ) -> Read:
        """Returns what a function makes of a body's content. left: returns when the client has
        gone.

        Raises ``ApiError`` where too many bodies wait or the time is over, and ``ClientDisconnect``
        where nobody waits for the answer any more. What is being read is read to its end.
        """
        if not body.is_long:
            return await run_in_threadpool(read, body.content)
        await self._turn(left)
        try:
            return await run_in_threadpool(read, body.content)
        finally:
            self._long.release()

    async def _turn(self, left: Callable[[], Awaitable[None]]) -> None:
        """Returns when the semaphore has been acquired."""
        if not self._long.locked():
            await self._long.acquire()
            return
        if self._waiting >= WAITING:
            raise ApiError(
                429, "too many long bodies wait to be read: come again later.", code="queue_full"
            )
        self._waiting += 1
        turn = asyncio.ensure_future(self._long.acquire())
        leaving = asyncio.ensure_future(left())
        try:
            await asyncio.wait(
                {turn, leaving}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            if turn.done():
                self._long.release()
            raise
        finally:
            self._waiting -= 1
            turn.cancel()  # does nothing to one that is done
            leaving.cancel()
        if turn.done() and not turn.cancelled():
            return
        if leaving.done() and not leaving.cancelled():
            raise ClientDisconnect
        raise ApiError(504, "the request took longer than this server allows.", code="timeout")
