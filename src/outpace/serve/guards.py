"""ASGI middleware around the endpoints: host names, API keys, failures, and the request log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.serve.openai.errors import ApiError

log = logging.getLogger("outpace.serve")

OPEN = frozenset({"/health", "/ready"})
"""Endpoints that need no key and answer to every host. The page needs no key either: it asks for
it."""

PROBES = frozenset({*OPEN, "/metrics"})
"""What machines ask every few seconds."""

_HOST = re.compile(r"(?:\[(?P<address>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]*)?")
"""A Host header: a name or an IPv6 address, and maybe a port."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def failure(error: ApiError) -> JSONResponse:
    """Returns an error as an answer."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    if error.status == 429:
        headers = {"Retry-After": "1"}
    return JSONResponse(error.body, error.status, headers)


class Hosts:
    """Answers only requests whose Host header names a known host. Otherwise a web page could have a
    name of its own lead to this server, and call it (DNS rebinding). ``/health`` and ``/ready``
    answer under every name, since health checks use this machine's own: such a page may learn that
    a server runs, and how busy it is."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = [_bare(host) for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._answers(scope):
            error = ApiError(
                400,
                "this server does not answer to the host of the request: see --allowed-host.",
            )
            await failure(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _answers(self, scope: Scope) -> bool:
        return scope["path"] in OPEN or self._knows(Headers(scope=scope).get("host", ""))

    def _knows(self, header: str) -> bool:
        """Whether a Host header names a known host. Starlette has such a check, too, but not each
        of its versions can read an IPv6 address with a port."""
        found = _HOST.fullmatch(header.strip())
        if found is None:
            return False
        name = (found["address"] or found["name"]).lower()
        return any(
            name == host or (host.startswith("*") and name.endswith(host[1:]))
            for host in self._hosts
        )


def _bare(host: str) -> str:
    """Returns a host's name as it is compared: without the brackets of an IPv6 address."""
    return host.lower().removeprefix("[").removesuffix("]")


class Keys:
    """Lets in whoever shows one of the API keys.

    Only hashes of the keys are kept, and all of them are compared, each in constant time: how long
    an answer takes says nothing about a key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._lets_in(scope):
            error = ApiError(
                401, "send an API key as 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )
            await failure(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in self._open or scope["method"] == "OPTIONS":
            return True
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        shown = _digest(key.strip())
        known = [hmac.compare_digest(shown, digest) for digest in self._digests]
        scope.setdefault("state", {})["key"] = shown
        return kind.lower() == "bearer" and any(known)


def client_of(request: Request, user: str | None) -> str | bytes | None:
    """Returns who asks: by API key where there are keys, so that nobody is many; else by the field
    ``user``; None where it is not known."""
    key: bytes | None = getattr(request.state, "key", None)
    return user if key is None else key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Failures:
    """Answers what no handler has foreseen with status 500, so that this answer is like all others:
    it stands inside of whatever adds headers to them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def note_begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_begin)
        except Exception as error:
            if scope["type"] != "http":
                raise
            log.exception("request %s failed", scope["state"]["number"])
            if begun:  # all that is left is to break it off
                raise
            await failure(ApiError.of(error))(scope, receive, send)


class RequestLog:
    """Gives every request a number, which its answer carries, and writes one line about it.

    The line is JSON, and holds nothing of what was said unless handlers put it into
    ``request.state.log``. A probe (`PROBES`) has one only where its status is another than that of
    the probe before it, which the first follows as if that had been 200.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._probed = dict.fromkeys(PROBES, 200)

    def _is_news(self, path: str, status: int) -> bool:
        before = self._probed.get(path)
        if before is not None:
            self._probed[path] = status
        return status != before

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, given = perf_counter(), Headers(scope=scope).get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        notes: dict[str, Any] = {}
        scope.setdefault("state", {}).update(log=notes, number=number)
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = number
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            line = {
                "event": "request",
                "id": number,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(perf_counter() - begin, 4),
                **notes,
            }
            if self._is_news(scope["path"], status):
                log.info("%s", json.dumps(line, ensure_ascii=False))
