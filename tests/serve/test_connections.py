"""Connections and bodies that come in slowly or never, and streams with nothing to say."""

from __future__ import annotations

import http.client
import json
import socket
import time
from contextlib import closing

import pytest

from outpace import LLM
from outpace.serve import bodies, listening, open_calls

from .conftest import call, running, wait_for

ENDLESS = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


def connected(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)


def test_an_object_of_many_fields_is_read_at_once(llm: LLM) -> None:
    fields = ",".join(f'"{number}":0' for number in range(100_000))
    with running(llm) as url:
        begin = time.perf_counter()
        status, body, _ = call(url, "/detokenize", raw=f'{{{fields},"7":0}}'.encode())
        assert time.perf_counter() - begin < 30  # each looked for among all others: hours
    assert status == 400
    assert "the field '7' twice" in body["error"]["message"]


def test_bodies_that_are_held_back_fill_no_memory(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "TOGETHER", 2)
    short = json.dumps({"prompt": "a", "max_tokens": 1})
    body = (short[:-1] + " " * 90_000 + "}").encode()
    with running(llm, max_body_bytes=100_000) as url:
        waiting = [connected(url) for _ in range(2)]
        for connection in waiting:
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[:-1])
        wait_for(lambda: call(url, "/v1/completions", raw=body)[0] == 429)
        assert call(url, "/v1/completions", raw=short.encode())[0] == 200, "a short one is taken"
        for connection in waiting:
            connection.send(body[-1:])
            with closing(connection), connection.getresponse() as answer:
                assert answer.status == 200
                answer.read()
        assert call(url, "/v1/completions", raw=body)[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: a\r\n"])
def test_a_connection_without_a_request_is_closed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.5)
    with running(llm) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(sent)
            assert connection.recv(1) == b""


def test_a_connection_with_a_request_stays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.02)
    with running(llm) as url:
        begin = time.perf_counter()
        assert call(url, "/v1/completions", {**ENDLESS, "n": 2})[0] == 200
        assert time.perf_counter() - begin > 0.05, "it was looked at twice"


def test_a_stream_with_nothing_to_say_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_calls, "KEEPALIVE_SECONDS", 0.0001)
    asked = {**ENDLESS, "max_tokens": 100}
    with running(llm) as url:
        with closing(connected(url)) as connection:
            body, kind = json.dumps({**asked, "stream": True}), "application/json"
            connection.request("POST", "/v1/completions", body, {"Content-Type": kind})
            with connection.getresponse() as answer:
                raw = answer.read()
        whole = call(url, "/v1/completions", asked)[1]
    assert open_calls.STILL_THERE in raw
    parts = [json.loads(part[6:]) for part in raw.split(b"\n\n") if part.startswith(b"data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
