"""Requests to a server in the same process, without a port: they are answered by the application
that answers those of clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from outpace.llm import LLM
from outpace.serve.app import Server
from outpace.serve.settings import Settings

YEARS = 1e9
"""Seconds that a request may take where nobody waits for it."""
FULL_SECONDS = 0.05
"""Seconds after which a request is sent again that the server had no room for."""


@dataclass(frozen=True)
class Answered:
    """A server's answer to one request."""

    status: int
    request_id: str
    body: Any
    """Its JSON."""


class InProcess:
    """A server that is asked in its own process and event loop.

    model_name: by which requests call the model. max_body_bytes: the largest body.
    """

    def __init__(self, llm: LLM, model_name: str, max_body_bytes: int) -> None:
        settings = Settings(
            model_name=model_name,
            max_body_bytes=max_body_bytes,
            max_waiting=1 << 30,  # whoever asks here waits for its answers
            request_seconds=YEARS,
            drain_seconds=0.0,  # what is open when the work ends was given up
            playground=False,
        )
        self.rows = llm.engine.target.max_rows
        self._app = Server(llm, settings).app

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Plays the engine while the block runs."""
        async with self._app.router.lifespan_context(self._app):
            yield

    async def ask(self, path: str, body: bytes) -> Answered:
        """Returns the answer to a body that is sent to an endpoint."""
        while True:
            answer = await post(self._app, path, body)
            if answer.status != 429:
                return answer
            await asyncio.sleep(FULL_SECONDS)


async def post(app: ASGIApp, path: str, body: bytes) -> Answered:
    """Returns an application's answer to one request, which is JSON."""
    sent: list[Message] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.get_running_loop().create_future()  # nobody leaves
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    headers = dict(sent[0]["headers"])
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Answered(sent[0]["status"], headers[b"x-request-id"].decode(), json.loads(content))
