"""Short bodies are read while long ones wait."""

from __future__ import annotations

import asyncio
import threading

from outpace.serve.reading import LONG, LONG_AT_ONCE, Body, Reading


def test_a_short_body_never_waits_for_long_ones() -> None:
    free, begun = threading.Event(), []

    def slow(content: object) -> object:
        begun.append(content)
        assert free.wait(30)
        return content

    async def play() -> list[object]:
        reading = Reading()
        form = {"guided_regex": "a"}
        bodies = [Body(f"long {n}", LONG) if n % 2 else Body(form, 20) for n in range(60)]
        long = [asyncio.create_task(reading(slow, body)) for body in bodies]
        while len(begun) < LONG_AT_ONCE:
            await asyncio.sleep(0.001)
        short = await asyncio.wait_for(reading(str.upper, Body("short", LONG - 1)), 10)
        assert short == "SHORT"
        assert len(begun) == LONG_AT_ONCE
        free.set()
        return await asyncio.gather(*long)

    assert asyncio.run(play())[1::2] == [f"long {n}" for n in range(1, 60, 2)]
