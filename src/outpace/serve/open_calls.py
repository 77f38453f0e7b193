"""A call while it is being answered: deltas come from the engine's thread, and leave as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outpace.serve.engine_thread import (
    Delta,
    Job,
    OutOfTime,
    QueueFull,
    ShuttingDown,
    TooManyRequests,
)
from outpace.serve.openai.answers import DONE, Answer, event
from outpace.serve.openai.errors import ApiError

log = logging.getLogger("outpace.serve")

Deliver = Callable[[list[Delta]], None]

KEEPALIVE_SECONDS = 15.0
"""Seconds after which a stream says that it is still there: proxies close what is silent for a
minute, and a text may wait, or write a call of a function, for longer than that."""

STILL_THERE = b": the text is being written\n\n"
"""A comment, which readers of events leave out."""


class OpenCall:
    """A call that was handed to the engine. Deltas that have not left yet wait here.

    submit: hands the call over, given where to deliver.
    """

    def __init__(self, answer: Answer, submit: Callable[[Deliver], Job]) -> None:
        self._answer = answer
        self._deltas: asyncio.Queue[list[Delta]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.job = submit(self._deliver)

    def _deliver(self, deltas: list[Delta]) -> None:
        self._loop.call_soon_threadsafe(self._deltas.put_nowait, deltas)

    async def _arriving(self, silence: float | None = None) -> AsyncIterator[list[Delta]]:
        """Yields deltas until all texts have ended; raises the error that ended one of them.

        silence: seconds without deltas after which an empty list is yielded; None: never.
        """
        left = len(self.job.requests)
        while left:
            deltas: list[Delta] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(silence):
                    deltas = await self._deltas.get()
            for delta in deltas:
                if delta.error is not None or delta.finish_reason in ("abort", "error"):
                    raise answer_to(delta.error)
                left -= delta.finish_reason is not None
            yield deltas

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of a streamed answer. Its status is sent by then: an error is
        the last event but one."""
        sent = self._loop.time()
        try:
            for part in self._answer.opening():
                yield part
            async for deltas in self._arriving(KEEPALIVE_SECONDS):
                parts = list(self._answer.feed(deltas))
                if parts:
                    sent = self._loop.time()
                elif self._loop.time() - sent >= KEEPALIVE_SECONDS:
                    parts, sent = [STILL_THERE], self._loop.time()
                for part in parts:
                    yield part
        except ApiError as error:
            closing = iter([event(error.body), DONE])
        except Exception as error:  # a fault in making the events: sent as any other
            log.exception("the events of a text could not be made")
            closing = iter([event(ApiError.of(error).body), DONE])
        else:
            closing = self._answer.closing()
        for part in closing:
            yield part

    async def whole(self, request: Request) -> dict[str, Any]:
        """Returns the whole answer; raises ``ClientDisconnect`` as soon as nobody waits for it."""
        collecting = asyncio.ensure_future(self._collected())
        leaving = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            return collecting.result()
        finally:
            collecting.cancel()
            leaving.cancel()

    async def _collected(self) -> dict[str, Any]:
        # In a thread: log-probabilities of long texts take seconds to write down.
        async for deltas in self._arriving():
            await run_in_threadpool(self._answer.add, deltas)
        return await run_in_threadpool(self._answer.whole)


class Events(StreamingResponse):
    """A stream that gives back its rows however it ends: also if the client has gone."""

    def __init__(self, call: OpenCall, end: Callable[[], None]) -> None:
        super().__init__(
            call.events(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def disconnected(request: Request) -> None:
    """Returns when the client has gone; its body has been read by then."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer_to(error: Exception | None) -> ApiError:
    """Returns the answer to a client for the error that ended its text."""
    if isinstance(error, OutOfTime):
        return ApiError(504, "the request took longer than this server allows.", code="timeout")
    if isinstance(error, QueueFull):
        return ApiError(429, "too many texts wait already: come again later.", code="queue_full")
    if isinstance(error, TooManyRequests):
        return ApiError(
            429, "you have as many texts open as one client may: wait for one.", code="too_many"
        )
    if error is None or isinstance(error, ShuttingDown):
        return ApiError(503, "the server is shutting down.", code="shutting_down")
    return ApiError.of(error)
