"""Runs a server until it is told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from outpace.api import LLM
from outpace.serve.app import Server
from outpace.serve.connections import watched
from outpace.serve.settings import Settings

CLOSING_SECONDS = 2
"""Seconds in which answers can still be sent once their texts have ended."""


class Runner(uvicorn.Server):
    """Uvicorn, which refuses new requests as soon as it is told to stop.

    Its first signal (SIGTERM, Ctrl-C) drains: open requests go on, and within moments uvicorn
    closes the socket, so that new connections are refused. What comes in until then gets status
    503, or a closed connection where the request itself was not read yet. A second one ends the
    texts that are being written or wait, each with an answer that says so; a third one stops at
    once.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], None], end: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drain, self._end = drain, end
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 2:
            self._end()
            return
        if self._signals == 1:
            self._drain()
        self.force_exit |= self._signals > 2
        super().handle_exit(sig, frame)


def make_runner(llm: LLM, settings: Settings) -> Runner:
    """Returns a server that is ready to be run with sockets from `listening.listen`."""
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
    return Runner(config, server.drain, server.thread.end_all)


def serve(llm: LLM, settings: Settings, listening: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C, and until open requests have ended. Behind Ctrl-C it returns;
    SIGTERM then ends the process, as the signal would have."""
    runner = make_runner(llm, settings)
    try:
        runner.run(sockets=[listening])
    except KeyboardInterrupt:
        return
