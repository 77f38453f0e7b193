"""A real server on a free port of this machine, over the bundled pair."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outpace import LLM
from outpace.serve.listening import listen, make_runner
from outpace.serve.settings import Settings

MODEL = "tiny"


@contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[str]:
    """Serves while the block runs; yields the address."""
    chosen = Settings(**{"model_name": MODEL, "port": 0, "drain_seconds": 120.0, **settings})
    listening = listen(chosen)
    runner = make_runner(llm, chosen)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_for(lambda: runner.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        runner.should_exit = True
        wait_for(lambda: not thread.is_alive(), 30.0)
        assert not llm.engine.has_unfinished_requests


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits until something is so; fails if it is not soon enough."""
    for _ in range(int(seconds / 0.01)):  # not by the clock: the whole process may be stopped
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def call(
    url: str,
    path: str,
    body: Any = None,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    method: str | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """Sends one request; returns status, body (parsed if it is JSON), and headers."""
    sent = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
    named = {**({} if sent is None else {"Content-Type": "application/json"}), **(headers or {})}
    with contextlib.closing(connection):
        connection.request(method or ("GET" if sent is None else "POST"), path, sent, named)
        answer = connection.getresponse()
        data = answer.read()
    found = dict(answer.getheaders())
    if found.get("content-type", "").startswith("application/json"):
        return answer.status, json.loads(data), found
    return answer.status, data.decode(), found


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The bundled pair; coupled, so that speculation changes no token."""
    return LLM(
        speculative_config={"method": "draft_model", "verify": "coupled"},
        max_num_seqs=6,
        enable_prefix_caching=True,
        max_model_len=512,
    )


@pytest.fixture
def url(llm: LLM) -> Iterator[str]:
    """The address of a server."""
    with running(llm) as address:
        yield address


def running_requests_end(url: str) -> None:
    """Waits until no text has a row."""
    wait_for(lambda: call(url, "/ready")[1]["running"] == 0)
