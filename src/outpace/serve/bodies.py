"""Bodies of requests: how they are received and parsed, and read in threads: to tokenise megabytes,
or to compile the form that a text is to have, may take many seconds."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from outpace.core.strict_json import no_constant
from outpace.core.values import shown
from outpace.serve.openai.errors import ApiError

LONG = 1 << 16
"""Bytes from which on a body is long: a long prompt, or an image."""
MAX_LONG_BODIES = 4
"""Long bodies that are read at once, and as many short ones that ask for a form. The others wait
without a thread, so that there always is one for a short body."""
WAITING = 64
WAITING_BYTES = 1 << 25
"""Long bodies that may wait so, and bytes of all of them as they were sent. More are refused: each
is held in memory, where JSON may take twenty times as much."""

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
        """Whether reading it takes long because of its size."""
        return self.size >= LONG

    @property
    def asks_for_form(self) -> bool:
        """Whether reading it may take long because a form is compiled."""
        content = self.content
        return isinstance(content, dict) and any(content.get(name) for name in FORMS)


# -- reading: what a body asks for -----------------------------------------------------------------


class BodyParser:
    """Parses bodies, short ones at once."""

    def __init__(self, seconds: float, waiting_forms: int) -> None:
        """seconds: how long a body may wait for its turn. waiting_forms: short bodies that ask for
        a form and may wait: as many as texts."""
        self._long = _Turns(seconds, "long bodies", WAITING, WAITING_BYTES)
        self._forms = _Turns(seconds, "requests for a form", waiting_forms, waiting_forms * LONG)

    async def __call__(
        self, read: Callable[[Any], Read], body: Body, left: Callable[[], Awaitable[None]]
    ) -> Read:
        """Returns what a function makes of a body's content. left: returns when the client has
        gone.

        Raises ``ApiError`` where too many bodies wait or the time is over, and ``ClientDisconnect``
        where nobody waits for the answer any more. What is being read is read to its end.
        """
        if not body.is_long and not body.asks_for_form:
            return await run_in_threadpool(read, body.content)
        turns = self._long if body.is_long else self._forms
        await turns.acquire(body.size, left)
        try:
            return await run_in_threadpool(read, body.content)
        finally:
            turns.release()


class _Turns:
    """`MAX_LONG_BODIES` turns, for which bodies of one kind wait in order."""

    def __init__(self, seconds: float, kind: str, most: int, most_bytes: int) -> None:
        """seconds: how long a body may wait. kind: what they are, for an error's sentence. most,
        most_bytes: bodies that may wait, and bytes of all of them."""
        self._seconds, self._kind, self._most, self._most_bytes = seconds, kind, most, most_bytes
        self._free = asyncio.Semaphore(MAX_LONG_BODIES)
        self._waiting: list[int] = []  # bytes of each

    def release(self) -> None:
        """Gives a turn back."""
        self._free.release()

    async def acquire(self, size: int, left: Callable[[], Awaitable[None]]) -> None:
        """Returns when it is the turn of a body of this size, or raises as `BodyParser` does."""
        if not self._free.locked():
            await self._free.acquire()
            return
        full = self._waiting and sum(self._waiting) + size > self._most_bytes
        if full or len(self._waiting) >= self._most:
            raise ApiError(
                429, f"too many {self._kind} wait to be read: come again later.", code="queue_full"
            )
        self._waiting.append(size)
        turn = asyncio.ensure_future(self._free.acquire())
        leaving = asyncio.ensure_future(left())
        try:
            await asyncio.wait(
                {turn, leaving}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            if turn.done():
                self._free.release()
            raise
        finally:
            self._waiting.remove(size)
            turn.cancel()  # does nothing to one that is done
            leaving.cancel()
        if turn.done() and not turn.cancelled():
            return
        if leaving.done() and not leaving.cancelled():
            raise ClientDisconnect
        raise ApiError(504, "the request took longer than this server allows.", code="timeout")


# -- receiving: size, time and JSON ----------------------------------------------------------------

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
        self._parsing = asyncio.Semaphore(MAX_LONG_BODIES)

    async def __call__(self, request: Request) -> Body:
        """Returns a request's body, which is JSON; ``ApiError`` for what is none, for too much, and
        for what has not come in time.

        Only ``application/json`` is read: a web page of another origin cannot send that unasked.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "send the body as 'Content-Type: application/json'.")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise ApiError(
                415,
                f"bodies with 'Content-Encoding: {shown(coding[:70])[1:-1]}' are not read: send "
                "the JSON itself.",
            )
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
    too_large: list[str] = []

    def number(text: str) -> float:
        found = float(text)
        if math.isinf(found):
            too_large.append(text)
        return found

    try:
        content = json.loads(
            whole, parse_constant=no_constant, parse_float=number, object_pairs_hook=_object
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}.") from error
    if too_large:
        _check_infinite(content)
    return content


def _check_infinite(content: Any) -> None:
    """Raises ``ApiError`` for a number that is larger than any that a program can hold, as 1e400
    is. Only a bias may be: JSON has no other way to say that a token never comes."""
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [
                (_cut(f"{path}.{name}" if path else name), of) for name, of in value.items()
            ]
        elif isinstance(value, list):
            waiting += [(_cut(f"{path}[{index}]"), of) for index, of in enumerate(value)]
        elif isinstance(value, float) and math.isinf(value):
            if value < 0 and path.startswith("logit_bias."):
                continue
            name = shown(path)[1:-1]
            raise ApiError(
                400,
                f"{name} must be a number that a program can hold, and this one is too large: send "
                "a smaller one.",
                name,
            )


def _cut(path: str) -> str:
    """The path of a value, no longer than an error's sentence shows: a body has a million values,
    and the names before them may be long."""
    return path[:70]


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
