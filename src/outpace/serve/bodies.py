"""Bodies of requests as they come in: their size, their time, and their JSON."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from outpace.core.strict_json import no_constant
from outpace.core.values import shown
from outpace.serve.openai.errors import ApiError
from outpace.serve.reading import LONG, LONG_AT_ONCE, Body

TOGETHER = 64
"""Bodies of the largest size that may be held at once until they are parsed. Otherwise whoever
opens a thousand connections and sends each body but for its last byte would fill the memory. Short
bodies are taken all the same."""


class Bodies:
    """Receives bodies.

    most: bytes that one may have. seconds: how long one may take to come.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._held = 0  # bytes of all bodies that are coming in, or wait to be parsed
        self._parsing = asyncio.Semaphore(LONG_AT_ONCE)

    async def __call__(self, request: Request) -> Body:
        """Returns a request's body, which is JSON; ``ApiError`` for what is none, for too much, and
        for what has not come in time.

        Only ``application/json`` is read: a web page of another origin cannot send that unasked.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "send the body as 'Content-Type: application/json'.")
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._seconds):
                await self._receive(request, parts)
            return await self._body(b"".join(parts))
        except TimeoutError as error:
            raise ApiError(
                408, f"the body has not come within {self._seconds:g} seconds: send it again."
            ) from error
        finally:
            self._held -= sum(map(len, parts))

    async def _receive(self, request: Request, parts: list[bytes]) -> None:
        """Adds what comes to the parts."""
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            self._held += len(part)
            if size > self._most:
                raise ApiError(413, f"the body is larger than {self._most} bytes: send less.")
            if size > LONG and self._held > TOGETHER * self._most:
                raise ApiError(
                    429, "too many bodies come in at once: come again later.", code="queue_full"
                )

    async def _body(self, whole: bytes) -> Body:
        if len(whole) < LONG:
            return Body(_parsed(whole), len(whole))
        # Megabytes take a second, in which everybody else would wait. Few at once: there are as
        # many threads for all requests together.
        async with self._parsing:
            return Body(await run_in_threadpool(_parsed, whole), len(whole))


def _parsed(whole: bytes) -> Any:
    try:
        return json.loads(whole, **_STRICT)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}.") from error


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object; ``ApiError`` for one with a field that comes twice, of which Python would
    take the last and another reader the first."""
    found = dict(fields)
    if len(found) < len(fields):
        times = Counter(name for name, _ in fields)
        twice = next(name for name, count in times.items() if count > 1)
        named = shown(twice[:70])
        raise ApiError(400, f"the body holds the field {named} twice in one object: send it once.")
    return found


_STRICT: dict[str, Any] = {"parse_constant": no_constant, "object_pairs_hook": _object}
"""How JSON is read, where Python would take more than it says."""
