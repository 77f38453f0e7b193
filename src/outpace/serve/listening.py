"""The port, from the first moment until the server stops: while the model loads, whoever asks is
answered that it does."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from outpace.errors import ConfigError, ProcessLost
from outpace.serve.guards import RequestLog, failure
from outpace.serve.openai.errors import ApiError
from outpace.serve.settings import Settings

if TYPE_CHECKING:
    from outpace.llm import LLM

# -- connections on which no request comes ---------------------------------------------------------

HEAD_SECONDS = 20.0
"""How often a connection is looked at: one without a request at two looks in a row is closed.
Uvicorn limits only how long a connection may be silent *after* a request: a thousand on which
nothing comes, or half a line, would leave no room for others."""


def watched() -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol, which closes connections that have no request in the making when
    looked at twice, ``HEAD_SECONDS`` apart."""
    protocol: Any = AutoHTTPProtocol  # its kind depends on what is installed

    class Watched(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._look_later()

        def connection_lost(self, exc: Exception | None) -> None:
            self._next_look.cancel()
            super().connection_lost(exc)

        def _look_later(self) -> None:
            self._before = self._idle_after()
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(HEAD_SECONDS, self._look)

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            now = self._idle_after()
            if now is not None and now is self._before:
                self.transport.close()
            else:
                self._look_later()

        def _idle_after(self) -> Any:
            """The answer after which nothing has begun, this protocol before the first one, None
            while a request is answered."""
            if self.cycle is None:
                return self
            return self.cycle if self.cycle.response_complete else None

    return Watched


# -- while the model is loaded ---------------------------------------------------------------------

BACKLOG = 2048
RETRY_SECONDS = 2
"""Seconds after which clients should come again while the model is loaded."""


def listen(settings: Settings) -> socket.socket:
    """Returns the socket to listen at; ``ConfigError`` where that cannot be."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        # A name such as localhost may have several: clients try the older kind in any case.
        address = next((one for one in found if one[0] == socket.AF_INET), found[0])
        return socket.create_server(address[4][:2], family=address[0], backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # the second: a name that can be no host's
        raise ConfigError(
            f"cannot listen at {settings.host}:{settings.port} ({error}): choose another --host or "
            "--port."
        ) from error


class Loading:
    """An ASGI application for the time in which the model is loaded: the server lives, and every
    request but ``/health`` is answered with status 503."""

    def __init__(self) -> None:
        self._step = ""

    def report(self, step: str, done: float) -> None:
        """Sets what is being done, and how much of it is done (0 to 1)."""
        self._step = f" ({step}, {done:.0%})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            answer = JSONResponse({"status": "loading"})
        else:
            words = f"the model is being loaded{self._step}: try again in a few seconds."
            answer = failure(ApiError(503, words, code="loading"))
            answer.headers["Retry-After"] = str(RETRY_SECONDS)
        answer.headers["Connection"] = "close"  # the next request is for the server itself
        await answer(scope, receive, send)


@contextmanager
def answering(listening: socket.socket, loading: Loading) -> Iterator[None]:
    """Answers at a socket while the block runs, in a thread of its own. Afterwards connections
    wait for who listens there next."""
    config = uvicorn.Config(
        RequestLog(loading),
        http=watched(),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    own = listening.dup()  # it is closed with the server
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [own]}, name="outpace-loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def log_to_stderr() -> None:
    """Writes the log to standard error, one line for each event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    own = logging.getLogger("outpace.serve")
    own.addHandler(handler)
    own.setLevel(logging.INFO)
    own.propagate = False


# -- the server ------------------------------------------------------------------------------------

CLOSING_SECONDS = 2
"""Seconds in which answers can still be sent once their texts have ended."""


class ServerRunner(uvicorn.Server):
    """Uvicorn, which refuses new requests as soon as a signal asks it to stop.

    Its first signal (SIGTERM, Ctrl-C) drains: open requests go on, and within moments uvicorn
    closes the socket, so that new connections are refused. What comes in until then gets status
    503, or a closed connection where the request itself was not read yet. A second one ends the
    texts that are being written or wait, each with an answer that says so; a third one stops at
    once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], None],
        end: Callable[[], None],
        failure_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        """failure_reason: why nothing can be computed any more, None as long as it can."""
        super().__init__(config)
        self._drain, self._end, self.failure_reason = drain, end, failure_reason
        self._signals = 0

    async def on_tick(self, counter: int) -> bool:
        if self.failure_reason() is not None and not self.should_exit:
            self._drain()
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 2:
            self._end()
            return
        if self._signals == 1:
            self._drain()
        self.force_exit |= self._signals > 2
        super().handle_exit(sig, frame)


def make_runner(llm: LLM, settings: Settings) -> ServerRunner:
    """Returns a server that is ready to be run with sockets from `listen`."""
    from outpace.serve.app import Server  # it takes seconds to import

    server = Server(llm, settings)
    config = uvicorn.Config(
        server.app,
        http=watched(),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(settings.drain_seconds) + CLOSING_SECONDS,
    )
    return ServerRunner(
        config, server.drain, server.thread.end_all, lambda: llm.engine.target.failure_reason
    )


def run_until_stopped(runner: ServerRunner, listening: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C, and until open requests have ended. After Ctrl-C it returns;
    SIGTERM then ends the process, as the signal would have. Raises ``ProcessLost`` where it ended
    because nothing can be computed any more."""
    try:
        runner.run(sockets=[listening])
    except KeyboardInterrupt:
        return
    reason = runner.failure_reason()
    if reason is not None:
        raise ProcessLost(reason)
