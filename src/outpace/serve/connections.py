"""Connections on which no request comes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0
"""How often a connection is looked at: one without a request at two looks in a row is closed.
Uvicorn limits only how long a connection may be silent *behind* a request: a thousand on which
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
            self._before = self._idle_behind()
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(HEAD_SECONDS, self._look)

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            now = self._idle_behind()
            if now is not None and now is self._before:
                self.transport.close()
            else:
                self._look_later()

        def _idle_behind(self) -> Any:
            """The answer behind which nothing has begun, this protocol before the first one, None
            while a request is answered."""
            if self.cycle is None:
                return self
            return self.cycle if self.cycle.response_complete else None

    return Watched
