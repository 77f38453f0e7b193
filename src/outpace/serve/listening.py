"""The port from the first moment on: it is taken, and whoever asks is told that the model loads."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outpace.errors import ConfigError
from outpace.serve.connections import watched
from outpace.serve.guards import RequestLog, failure
from outpace.serve.openai.errors import ApiError
from outpace.serve.settings import Settings

BACKLOG = 2048
RETRY_SECONDS = 2
"""Seconds after which clients are told to come again while the model is loaded."""


def listen(settings: Settings) -> socket.socket:
    """Returns the socket to listen at; ``ConfigError`` where that cannot be."""
    try:
        address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
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

    def heard(self, step: str, done: float) -> None:
        """Is told what is being done, and how much of it is done (0 to 1)."""
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
    """Answers at a socket while the block runs, in a thread of its own. Behind it connections wait
    for who listens there next."""
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
