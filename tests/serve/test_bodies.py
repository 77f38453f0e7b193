"""Short bodies are read while long ones wait, and these do not wait for ever."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.requests import ClientDisconnect

from outpace import LLM
from outpace.serve.bodies import LONG, MAX_LONG_BODIES, WAITING, Body, BodyParser, _parsed
from outpace.serve.openai.calls import Call, Reader
from outpace.serve.openai.errors import ApiError

from .conftest import call, running

MANY = Body("long", LONG)
FORMS = 100
"""Short bodies with a form that may wait."""


async def stays() -> None:
    """A client that does not leave."""
    await asyncio.Event().wait()


class Slow:
    """Reads bodies until it is told to end."""

    def __init__(self) -> None:
        self.begun: list[object] = []
        self._free = threading.Event()

    def __call__(self, content: object) -> object:
        self.begun.append(content)
        assert self._free.wait(30)
        return content

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Lets all of them end when the block does, however that is."""
        try:
            yield
        finally:
            self._free.set()

    async def fill(self, reading: BodyParser) -> list[asyncio.Task[object]]:
        """Takes all turns."""
        taken = [asyncio.create_task(reading(self, MANY, stays)) for _ in range(MAX_LONG_BODIES)]
        while len(self.begun) < MAX_LONG_BODIES:
            await asyncio.sleep(0.001)
        return taken


def test_a_short_body_never_waits_for_long_ones() -> None:
    slow = Slow()

    async def play() -> list[object]:
        reading = BodyParser(60, FORMS)
        form = {"guided_regex": "a"}
        bodies = [Body(f"long {n}", LONG) if n % 2 else Body(form, 20) for n in range(60)]
        with slow.until_the_end():
            long = [asyncio.create_task(reading(slow, body, stays)) for body in bodies]
            while len(slow.begun) < 2 * MAX_LONG_BODIES:
                await asyncio.sleep(0.001)
            body = Body("short", LONG - 1)
            short = await asyncio.wait_for(reading(str.upper, body, stays), 10)
            assert short == "SHORT"
            assert len(slow.begun) == 2 * MAX_LONG_BODIES, "as many of each kind"
        return await asyncio.gather(*long)

    assert asyncio.run(play())[1::2] == [f"long {n}" for n in range(1, 60, 2)]


def test_only_so_many_long_bodies_wait() -> None:
    slow = Slow()

    async def play() -> None:
        reading = BodyParser(60, FORMS)
        with slow.until_the_end():
            taken = await slow.fill(reading)
            taken += [asyncio.create_task(reading(slow, MANY, stays)) for _ in range(WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as refused:
                await reading(slow, MANY, stays)
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
        await asyncio.gather(*taken)
        assert await reading(slow, MANY, stays) == "long", "there is room again"

    asyncio.run(play())


def test_short_bodies_with_a_form_wait_in_a_queue_of_their_own() -> None:
    """Four bodies of megabytes do not hold them up, and as many may wait as texts."""
    slow = Slow()
    form = Body({"tools": [1]}, 20)

    async def play() -> None:
        reading = BodyParser(60, FORMS)
        with slow.until_the_end():
            taken = await slow.fill(reading)
            assert await asyncio.wait_for(reading(lambda _: "read", form, stays), 10) == "read"
            asked = range(MAX_LONG_BODIES + FORMS)
            taken += [asyncio.create_task(reading(slow, form, stays)) for _ in asked]
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="too many requests for a form") as refused:
                await reading(slow, form, stays)
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
        await asyncio.gather(*taken)

    asyncio.run(play())


def test_where_a_number_is_too_large_is_found_in_little_memory() -> None:
    """The path to each value of a body would take gigabytes."""
    name, count = "A" * 100_000, 20_000
    body = f'{{"{name}": [1e999, {"0, " * count}0]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="AAA must be a number that a program can hold"):
            _parsed(body)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_body_waits_no_longer_than_its_time_and_its_client() -> None:
    slow = Slow()

    async def leaves() -> None:
        await asyncio.sleep(0.01)

    async def play() -> None:
        reading = BodyParser(0.05, FORMS)
        with slow.until_the_end():
            taken = await slow.fill(reading)
            with pytest.raises(ApiError) as late:
                await reading(slow, MANY, stays)
            assert (late.value.status, late.value.code) == (504, "timeout")
            with pytest.raises(ClientDisconnect):
                await reading(slow, MANY, leaves)
            ended = asyncio.create_task(reading(slow, MANY, stays))
            await asyncio.sleep(0)
            ended.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ended
        await asyncio.gather(*taken)
        assert len(slow.begun) == MAX_LONG_BODIES
        again = [reading(slow, MANY, stays) for _ in range(MAX_LONG_BODIES)]
        assert await asyncio.gather(*again) == ["long"] * MAX_LONG_BODIES, "no turn was lost"

    asyncio.run(play())


def test_reading_is_a_part_of_a_requests_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader.completion

    def slowly(self: Reader, body: object) -> Call:
        threading.Event().wait(0.6)
        return read(self, body)

    monkeypatch.setattr(Reader, "completion", slowly)
    with running(llm, request_seconds=0.5) as url:
        status, answer, _ = call(url, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert (status, answer["error"]["code"]) == (504, "timeout")
