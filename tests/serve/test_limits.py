"""Who is let in, how much is taken, and what happens at the end."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from outpace import LLM
from outpace.cli.serve import name_of
from outpace.errors import ConfigError
from outpace.serve.app import Server
from outpace.serve.engine_thread import Delta, Job, ShuttingDown
from outpace.serve.listening import listen
from outpace.serve.openai.answers import TextChoice
from outpace.serve.openai.calls import Reader
from outpace.serve.settings import KEY_VARIABLE, Settings, read_keys
from processes import killed_after, python

from .conftest import MODEL, call, running, wait_for

ENDLESS = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


def opened(url: str, body: Any, path: str = "/v1/completions") -> http.client.HTTPConnection:
    """Sends a request and does not wait for its answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def running_now(url: str) -> int:
    return call(url, "/ready")[1]["running"]


def test_a_model_whose_scores_are_no_numbers_is_the_servers_fault(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    score = llm.engine.target.score

    def broken(inputs: Any) -> Any:
        scores = score(inputs)
        scores.logits.fill_(float("nan"))
        return scores

    monkeypatch.setattr(llm.engine.target, "score", broken)
    with running(llm) as url:
        status, said, _ = call(url, "/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert (status, said["error"]["code"]) == (500, "internal")
    assert "a text ended with an error" in caplog.text
    assert "scores of the next token are not finite numbers" in caplog.text


# -- keys ------------------------------------------------------------------------------------------


def test_keys(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outpace.serve")
    with running(llm, api_keys=("first-secret", "second-secret")) as url:
        for key in ("first-secret", "second-secret"):
            headers = {"Authorization": f"Bearer {key}"}
            assert call(url, "/v1/models", headers=headers)[0] == 200
        for given in ("Bearer wrong", "first-secret", "Basic first-secret", "Bearer ", "Bearer é"):
            encoded = given.encode().decode("latin-1")
            status, answer, headers = call(url, "/metrics", headers={"Authorization": encoded})
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        assert call(url, "/v1/completions", {"prompt": "a"})[0] == 401
        assert [call(url, path)[0] for path in ("/health", "/ready", "/")] == [200] * 3
    assert "secret" not in caplog.text


def test_keys_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffone\n# ours\n\n two \n  # theirs\n", encoding="utf-8")
    assert read_keys(file, {KEY_VARIABLE: "three, one"}) == ("three", "one", "two")
    assert read_keys(None, {}) == ()
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_keys(file, {})
    with pytest.raises(ConfigError, match="cannot read API key file"):
        read_keys(tmp_path / "missing", {})
    with pytest.raises(ConfigError, match="no header of a request can carry"):
        read_keys(None, {KEY_VARIABLE: "schl\u00fcssel"})


# -- bodies and headers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 200_000, "application/json", 413),
        (b"[" * 50_000, "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b'{"prompt": "a", "temperature": 1e999}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"\\ud800": 1e999}', "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b'["prompt"]', "application/json", 400),
    ],
)
def test_rubbish_is_refused(llm: LLM, raw: bytes, kind: str, status: int) -> None:
    with running(llm, max_body_bytes=100_000) as url:
        found = call(url, "/v1/completions", raw=raw, headers={"Content-Type": kind})
        assert found[0] == status, found
        assert found[1]["error"]["message"]


def test_a_body_that_was_compressed_is_refused_by_its_coding(url: str) -> None:
    raw = gzip.compress(b'{"prompt": "a"}')
    kind = {"Content-Type": "application/json"}
    status, answer, _ = call(
        url, "/v1/completions", raw=raw, headers={**kind, "Content-Encoding": "gzip"}
    )
    assert status == 415
    assert "'Content-Encoding: gzip'" in answer["error"]["message"]
    plain = {**kind, "Content-Encoding": "identity"}
    assert call(url, "/v1/completions", raw=b'{"prompt": "a"}', headers=plain)[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"temperature": 1e999', "temperature"),
        ('"chat_template_kwargs": {"a": [0, -1e400]}', "chat_template_kwargs.a[1]"),
        ('"logit_bias": {"3": 1e400}', "logit_bias.3"),
        ('"metadata": {"a": {"b": 1e400}}', "metadata.a.b"),
    ],
)
def test_a_number_that_no_program_can_hold_is_refused_by_its_place(
    llm: LLM, fields: str, param: str
) -> None:
    raw = f'{{"messages": [{{"role": "user", "content": "a"}}], {fields}}}'.encode()
    with running(llm) as url:
        headers = {"Content-Type": "application/json"}
        status, body, _ = call(url, "/v1/chat/completions", raw=raw, headers=headers)
    assert (status, body["error"]["param"]) == (400, param)
    assert "a number that a program can hold" in body["error"]["message"]


def test_a_bias_may_be_minus_infinity(llm: LLM) -> None:
    usual = llm.generate("Once", {"max_tokens": 1, "temperature": 0})[0]
    asked = '"prompt": "Once", "max_tokens": 1, "temperature": 0'
    raw = f'{{{asked}, "logit_bias": {{"{usual.token_ids[0]}": -1e400}}}}'.encode()
    with running(llm) as url:
        headers = {"Content-Type": "application/json"}
        status, body, _ = call(url, "/v1/completions", raw=raw, headers=headers)
    assert status == 200, body
    assert body["choices"][0]["text"] != usual.text


def test_other_origins_and_names_are_kept_out(llm: LLM) -> None:
    origin = {"Origin": "https://page.example"}
    with running(llm) as url:
        _, _, headers = call(url, "/v1/models", headers=origin)
        assert "access-control-allow-origin" not in headers
        status, body, _ = call(url, "/v1/models", headers={"Host": "page.example"})
        assert status == 400
        assert body["error"]["message"].endswith("see --allowed-host.")
    with running(llm, allowed_origins=("https://page.example",), allowed_hosts=("*",)) as url:
        _, _, headers = call(url, "/v1/models", headers={**origin, "Host": "page.example"})
        assert headers["access-control-allow-origin"] == "https://page.example"
        assert headers["access-control-expose-headers"] == "x-request-id"
        asked = {  # as OpenAI's package in a browser asks
            **origin,
            "Host": "page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-retry-count",
        }
        status, _, headers = call(url, "/v1/models", headers=asked, method="OPTIONS")
        assert status == 200
        assert "x-stainless-retry-count" in headers["access-control-allow-headers"]
    assert Settings(model_name="a", host="0.0.0.0").hosts == ("*",)


def test_a_name_with_two_addresses_listens_where_clients_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    newer = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: newer + own)
    with listen(Settings(model_name="a", host="localhost", port=0)) as listening:
        assert listening.family == socket.AF_INET


def test_the_names_of_this_machine_are_known_with_and_without_a_port(llm: LLM) -> None:
    names = ("localhost", "LOCALHOST", "127.0.0.1", "[::1]")
    others = ("page.example", "localhost.page.example", "[::2]", "[::1]x", "[::1", "::1", "")

    def status(host: str, path: str = "/v1/models") -> int:
        return call(url, path, headers={"Host": host})[0]

    with running(llm) as url:
        for name in names:
            for host in (name, f"{name}:8000"):
                assert status(host) == 200, host
        for host in others:
            assert status(host) == 400, host
    with running(llm, allowed_hosts=("*.page.example", "::2")) as url:
        for host in ("a.page.example:80", "[::2]:8000"):
            assert status(host) == 200, host
        for host in ("page.example", "localhost"):
            assert status(host) == 400, host
            # Whoever watches the server asks under the machine's own name.
            assert [status(host, path) for path in ("/health", "/ready")] == [200, 200]


def test_requests_have_numbers_and_the_log_no_prompts(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outpace.serve")
    body = {"prompt": "a private matter", "max_tokens": 3}
    with running(llm) as url:
        _, _, headers = call(url, "/v1/completions", body, headers={"X-Request-Id": "mine-1"})
        assert headers["x-request-id"] == "mine-1"
        _, _, headers = call(url, "/health", headers={"X-Request-Id": "two words"})
        assert headers["x-request-id"] != "two words"
    lines = [json.loads(r.message) for r in caplog.records if r.message.startswith("{")]
    line = next(line for line in lines if line["id"] == "mine-1")
    assert (line["status"], line["completion_tokens"]) == (200, 3)
    assert "private" not in caplog.text
    with running(llm, log_prompts=True) as url:
        call(url, "/v1/completions", body)
    assert "private" in caplog.text


def test_a_probe_has_a_line_where_its_status_changes(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outpace.serve")
    with running(llm, api_keys=("a-key",)) as url:
        for key in ("wrong", "wrong", "a-key", "a-key", "wrong"):
            call(url, "/metrics", headers={"Authorization": f"Bearer {key}"})
            assert call(url, "/ready")[0] == 200
            assert call(url, "/health")[0] == 200
    lines = [json.loads(r.message) for r in caplog.records if r.message.startswith("{")]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/metrics", 401),
        ("/metrics", 200),
        ("/metrics", 401),
    ]


def test_paths_where_there_is_nothing_point_to_the_description(url: str) -> None:
    for path in ("/redoc", "/v1/embeddings", "/chat/completions", "/v1/chat/completions/"):
        status, answer, _ = call(url, path)
        assert status == 404
        assert "/openapi.json lists what there is" in answer["error"]["message"]
    status, answer, _ = call(url, "/v1/completions")
    assert status == 405
    assert "/openapi.json says which" in answer["error"]["message"]
    status, _, headers = call(url, "/docs")
    assert (status, urljoin(f"{url}/docs", headers["location"])) == (307, f"{url}/openapi.json")


def test_what_nobody_has_foreseen_is_told_and_logged_like_all_else(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise ZeroDivisionError("a secret")

    caplog.set_level(logging.INFO, "outpace.serve")
    monkeypatch.setattr(Reader, "text", fails)
    monkeypatch.setattr(TextChoice, "feed", fails)
    with running(llm) as url:
        named = {"X-Request-Id": "mine-2"}
        status, answer, headers = call(url, "/detokenize", {"tokens": [1]}, headers=named)
        assert (status, answer["error"]["code"]) == (500, "internal")
        assert headers["x-request-id"] == "mine-2"
        usage = {"include_usage": True}  # which an error takes the place of
        body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": usage}
        status, events, _ = call(url, "/v1/completions", body)
        assert status == 200
        assert '"code": "internal"' in events
        assert events.endswith("data: [DONE]\n\n")
        assert '"usage": {' not in events
        assert "secret" not in f"{answer} {events}"
    lines = [json.loads(r.message) for r in caplog.records if r.message.startswith("{")]
    assert next(line for line in lines if line["id"] == "mine-2")["status"] == 500
    page = {"Origin": "https://page.example"}
    with running(llm, allowed_origins=(page["Origin"],)) as url:
        status, _, headers = call(url, "/detokenize", {"tokens": [1]}, headers=page)
        assert (status, headers["access-control-allow-origin"]) == (500, page["Origin"])
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"drain_seconds": float("inf")},
        {"drain_seconds": float("nan")},
        {"request_seconds": float("nan")},
        {"host": ".."},
        {"host": "a" * 70 + ".com"},
    ],
    ids=str,
)
def test_settings_that_no_server_can_have(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"_seconds must be|cannot listen at"):
        listen(Settings(**{"model_name": "a", "port": 0, **wrong}))


# -- load ------------------------------------------------------------------------------------------


def test_a_full_queue_says_so(llm: LLM) -> None:
    with running(llm, max_waiting=1) as url:
        rows = llm.engine.target.max_rows
        held = [opened(url, {**ENDLESS, "stream": True}) for _ in range(rows + 1)]
        wait_for(lambda: running_now(url) == rows)
        wait_for(lambda: call(url, "/ready")[1]["waiting"] == 1)
        status, answer, headers = call(url, "/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert headers["retry-after"] == "1"
        for connection in held:
            connection.close()
        wait_for(lambda: running_now(url) == 0)
        assert call(url, "/v1/completions", {"prompt": "a"})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_leaves_gives_back_the_row(url: str, stream: bool) -> None:
    connection = opened(url, {**ENDLESS, "stream": stream, "n": 3})
    wait_for(lambda: running_now(url) == 3)
    connection.close()
    wait_for(lambda: running_now(url) == 0, seconds=2)


def test_whoever_reads_nothing_holds_up_nobody(url: str) -> None:
    slow = opened(url, {**ENDLESS, "max_tokens": 120, "stream": True, "n": 3, "logprobs": 20})
    status, answer, _ = call(url, "/v1/completions", {"prompt": "a b", "max_tokens": 20})
    assert (status, len(answer["choices"])) == (200, 1)
    wait_for(lambda: running_now(url) == 0)
    slow.close()


def test_time_is_limited(llm: LLM) -> None:
    with running(llm, request_seconds=0.05) as url:
        status, answer, _ = call(url, "/v1/completions", ENDLESS)
        assert (status, answer["error"]["code"]) == (504, "timeout")


# -- the end ---------------------------------------------------------------------------------------


def test_a_body_that_does_not_come_is_not_waited_for(llm: LLM) -> None:
    with running(llm, request_seconds=0.3) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"{")
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        connection.close()
    assert (answer.status, error["type"]) == (408, "timeout_error")
    assert "has not come within 0.3 seconds" in error["message"]


def test_clients_are_not_told_where_the_model_lies(llm: LLM) -> None:
    with running(llm) as url:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"self": 1},
        }
        status, answer, _ = call(url, "/v1/chat/completions", body)
    told = answer["error"]["message"]
    assert status == 400
    assert f"the chat template of {MODEL} refuses" in told
    assert str(llm.target.name) not in told


def test_open_requests_end_before_the_server_does(llm: LLM) -> None:
    found: list[Any] = []
    with running(llm) as url:
        asked = threading.Thread(
            target=lambda: found.append(call(url, "/v1/completions", {**ENDLESS, "n": 2}))
        )
        asked.start()
        wait_for(lambda: running_now(url) == 2)
    asked.join()
    status, answer, _ = found[0]
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 800


def test_what_takes_too_long_is_told_so_at_the_end(llm: LLM) -> None:
    settings = Settings(model_name=MODEL, drain_seconds=0.2)
    server = Server(llm, settings)
    server.thread.start()
    found: list[Delta] = []
    requests = llm.requests("a", {"max_tokens": 480, "ignore_eos": True})
    server.thread.submit(Job(requests, found.extend, 60))
    server.drain()
    with pytest.raises(ShuttingDown):
        server.thread.submit(Job(requests, found.extend, 60))
    wait_for(lambda: found)
    assert isinstance(found[0].error, ShuttingDown)
    server.thread.close(0)
    llm.engine.step()


def test_the_name_that_clients_call_a_model_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "big-model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = [None, "org/small", "small.gguf", ".", "./", "../big-model/"]
    found = ["outpace", "small", "small.gguf", "big-model", "big-model", "big-model"]
    assert [name_of(name) for name in names] == found


SERVE = "from outpace.cli.main import run; run()"
SERVED_SECONDS = 300
"""Seconds after which a command that still runs is killed."""


@contextmanager
def served(rows: int, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs the command; yields the address and the process, once that answers. What it says goes
    into a file: a pipe that nobody reads is full after some hundred requests, and then the server
    stands still."""
    words = ["serve", "--port", "0", "--threads", "1", "--max-num-seqs", str(rows)]
    environment = {**os.environ, KEY_VARIABLE: ""}
    command = python(SERVE, *words)
    with (
        log.open("wb") as said,
        subprocess.Popen(command, stderr=said, env=environment) as process,
        killed_after(SERVED_SECONDS, process),
    ):
        wait_for(lambda: process.poll() is not None or _address(log), SERVED_SECONDS)
        url = _address(log)
        assert url is not None, log.read_text()
        wait_for(lambda: _answers(url))
        yield url, process


def _address(log: Path) -> str | None:
    """Returns where the command serves, once it has said so."""
    found = re.search(r" serves .* at (\S+)\n", log.read_text())
    return found and found[1]


def test_the_command_serves_and_drains_at_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with served(rows=2, log=log) as (url, process):
        connection = opened(url, {**ENDLESS, "stream": True})
        with connection.getresponse() as answer:
            first = answer.readline()
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: _refuses(url))
            events = [one for one in (first, *answer) if one.strip()]
        connection.close()
        process.wait()
    rest = log.read_text()
    assert events[-1].strip() == b"data: [DONE]"
    said = [json.loads(one[6:]) for one in events if one.startswith(b"data: {")]
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in rest
    assert '"status": 200' in rest


def test_a_second_ctrl_c_ends_what_is_open_with_an_answer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with served(rows=1, log=log) as (url, process):
        held = opened(url, {**ENDLESS, "stream": True, "max_tokens": 900})
        with held.getresponse() as answer:
            first = answer.readline()
            waiting = opened(url, ENDLESS)  # sent earlier, it could come to the engine first
            wait_for(lambda: call(url, "/ready")[1]["waiting"] == 1)
            process.send_signal(signal.SIGINT)
            wait_for(lambda: _refuses(url))
            process.send_signal(signal.SIGINT)
            events = [one for one in (first, *answer) if one.strip()]
        refused = waiting.getresponse()
        told = json.loads(refused.read())["error"]["message"]
        held.close()
        waiting.close()
        process.wait()
    rest = log.read_text()
    assert events[-1].strip() == b"data: [DONE]"
    assert "error" in json.loads(events[-2][6:])
    assert (refused.status, "Traceback" in rest) == (503, False), told


def _answers(url: str) -> bool:
    try:
        return call(url, "/ready")[0] == 200
    except OSError:
        return False


def _refuses(url: str) -> bool:
    try:
        call(url, "/ready")
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # the connection was made just before the socket was closed
    return False


def test_the_name_of_the_model(url: str) -> None:
    assert call(url, "/v1/models")[1]["data"][0]["id"] == MODEL
