"""``outpace bench serve``: load on a running server."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace import LLM
from outpace.bench import serving
from outpace.bench.serving import (
    Clients,
    Load,
    Run,
    Served,
    Server,
    Turns,
    run_clients,
    run_load,
    summary,
)
from outpace.cli.bench_serve import AddressFlags
from outpace.cli.main import app
from outpace.errors import ConfigError

from .conftest import call, running


@pytest.fixture
def forgetful(llm: LLM) -> Iterator[str]:
    """The address of a server that forgets texts when it is asked to."""
    with running(llm, allow_forget=True) as address:
        yield address


def test_arrivals_follow_from_the_seed() -> None:
    load = Load(["a"] * 400, rate=10.0)
    assert load.arrivals() == Load(["b"] * 400, rate=10.0).arrivals()
    assert load.arrivals() != Load(["a"] * 400, rate=10.0, seed=1).arrivals()
    assert load.arrivals()[-1] == pytest.approx(40, rel=0.2)
    with pytest.raises(ConfigError, match="positive"):
        Load([], rate=0)


def test_the_figures() -> None:
    served = [Served(0.0, 0.5, 1.5, 11), Served(1.0, 3.0, 4.0, 21)]
    found = summary(Run(served, ["too busy"]), Server("", first_seconds=1.0, token_seconds=0.1))
    assert found["TTFT p50 (s)"] == pytest.approx(1.25)
    assert found["TPOT p50 (s)"] == pytest.approx(0.075)
    assert found["tokens/s"] == pytest.approx(8)
    assert found["goodput (requests/s)"] == pytest.approx(0.25)
    assert found["failed requests"] == 1


def test_tokens_of_the_first_event_are_no_part_of_the_time_per_token(url: str) -> None:
    assert Served(0.0, 1.0, 2.0, tokens=11, first_tokens=6).tpot == pytest.approx(0.2)
    assert Served(0.0, 1.0, 1.0, tokens=4, first_tokens=4).tpot == 0
    body = {"prompt": "Once upon a time", "max_tokens": 24, "stream": True, "temperature": 0}
    counted = {**body, "ignore_eos": True, "speculative": 6, "outpace": {"counts": True}}
    _, events, _ = call(url, "/v1/completions", counted)
    told = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    counts = [event["outpace"]["tokens"] for event in told]
    assert sum(counts) == 24
    assert max(counts) > 1
    (served,) = run_load(Load([body["prompt"]], 50.0, max_tokens=24), Server(url), "6").served
    assert served.first_tokens == counts[0]


def test_a_server_under_load(forgetful: str, tmp_path: Path) -> None:
    url = forgetful
    load = Load(["One day", "The cat"] * 3, rate=50.0, max_tokens=8)
    served = run_load(load, Server(url), "2").served
    assert len(served) == 6
    assert all(0 < one.ttft <= one.last - one.sent and 1 <= one.tokens <= 8 for one in served)
    file = tmp_path / "found.json"
    words = ["bench", "serve", "--url", url, "--rate", "50", "--num-requests", "4"]
    result = CliRunner().invoke(app, [*words, "--max-tokens", "4", "--json", str(file)])
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(file.read_text())) == {"off", "auto"}
    assert "goodput" in result.stdout


def test_clients_that_wait_for_their_answers(forgetful: str, tmp_path: Path) -> None:
    url = forgetful
    open_at_once = []
    load = Clients(["One day", "The cat"] * 4, count=2, max_tokens=8)
    served = run_clients(load, Server(url), "off").served
    for one in served:
        open_at_once.append(sum(other.sent <= one.sent < other.last for other in served))
    assert len(served) == 8
    assert max(open_at_once) == 2
    file, figure = tmp_path / "found.json", tmp_path / "load.png"
    words = ["bench", "serve", "--url", url, "--clients", "1,3", "--num-requests", "4"]
    words += ["--speculative", "off, auto"]
    words += ["--max-tokens", "4", "--repeats", "2", "--json", str(file), "--png", str(figure)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    found = json.loads(file.read_text())
    assert {kind: set(counts) for kind, counts in found.items()} == {
        "off": {"1", "3"},
        "auto": {"1", "3"},
    }
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(found["auto"]["3"]) == 2
    assert "tokens/s / off" in result.stdout


def test_texts_that_come_all_at_once_have_no_time_for_each_later_token() -> None:
    at_once, slow = Served(0.0, 1.0, 1.0, tokens=4, first_tokens=4), Served(0.0, 1.0, 2.0, tokens=5)
    server = Server("http://127.0.0.1:8000")
    found = summary(Run([at_once, at_once, slow]), server)
    assert found["TPOT p50 (s)"] == found["TPOT p99 (s)"] == 0.25
    assert summary(Run([at_once]), server)["TPOT p50 (s)"] == 0.0


def test_no_run_finds_the_texts_of_the_one_before() -> None:
    llm = LLM(speculative_config={"method": "suffix"}, enable_prefix_caching=True)
    prompt = "Once upon a time there was a little girl named Lily. She had a red ball and"
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    body["speculative"] = 4  # not as measured times suggest, which differ from run to run

    def played(url: str) -> tuple[int, int]:
        _, answer, _ = call(url, "/v1/completions", body)
        (metrics,) = answer["outpace"]["metrics"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return metrics["num_accepted_tokens"], cached

    with running(llm, allow_forget=True) as url:
        first, again = played(url), played(url)
        assert again[0] > first[0], "a text that is remembered drafts itself"
        assert again[1] > first[1] == 0
        Server(url).forget()
        assert played(url) == first
        assert call(url, "/forget", {"all": True})[0] == 400


def test_each_run_begins_with_a_server_that_has_forgotten(
    forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    forget = Server.forget
    monkeypatch.setattr(Server, "forget", lambda self: (done.append("forget"), forget(self))[1])
    monkeypatch.setattr(
        "outpace.bench.serving.run_load",
        lambda load, server, kind: (done.append(kind), run_load(load, server, kind))[1],
    )
    words = ["bench", "serve", "--url", forgetful, "--rate", "50", "--num-requests", "2"]
    result = CliRunner().invoke(app, [*words, "--max-tokens", "2", "--repeats", "2"])
    assert result.exit_code == 0, result.stderr
    runs = ["off", "auto", "auto", "off"]
    warm_up = ["off", "auto"]
    assert done == ["forget", *warm_up, *(step for kind in runs for step in ("forget", kind))]


def test_a_server_that_would_remember_is_refused(url: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--url", url])
    assert result.exit_code == 2
    assert "start it with --allow-forget" in " ".join(result.stderr.split())


def test_turns_are_compared_one_by_one() -> None:
    off, auto = [{"a": 1.0}, {"a": 5.0}, {"a": 2.0}], [{"a": 2.0}, {"a": 10.0}, {"a": 4.0}]
    turns = Turns({"off": off, "auto": auto})
    assert turns.medians() == {"off": {"a": 2.0}, "auto": {"a": 4.0}}
    ratio = turns.ratios("a")["auto"]
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "2", "--clients", "1"], "exclude each other"),
        (["--png", "x.png"], "needs --clients"),
        (["--clients", "0"], "at least one client"),
        (["--clients", "1,13"], "13 clients need a prompt each, and there are 12"),
        (["--speculative", "off, off"], "names one kind of request twice"),
        (["--num-requests", "13"], "holds 12 prompts, and each of 13 requests needs one"),
        (["--clients", "some"], "--clients must be numbers"),
        (["--json", "/dev/null/found.json"], "--json: cannot write"),
        (["--clients", "1", "--json", "/dev/null/found.json"], "--json: cannot write"),
    ],
)
def test_what_makes_no_load_is_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *words])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_what_goes_wrong_is_told_in_one_sentence(url: str) -> None:
    load = Load(["a"], rate=50.0)
    with pytest.raises(ConfigError, match="speculative"):
        run_load(load, Server(url), "fast")
    with pytest.raises(ConfigError, match="no address"):
        run_load(load, Server("localhost"))
    with pytest.raises(ConfigError, match="failed"):
        run_load(load, Server("http://127.0.0.1:9"))
    for address in ("http://127.0.0.1:port", "http://[::1"):
        with pytest.raises(ConfigError, match="no address"):
            run_load(load, Server(address))
        with pytest.raises(ConfigError, match="no address"):
            run_clients(Clients(["a"], 1), Server(address))
    with pytest.raises(ConfigError, match="positive"):
        Load(["a"], rate=float("nan"))


def test_ctrl_c_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TIMEOUT", 20.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.perf_counter()
        main = threading.main_thread().ident
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run_clients(Clients(["a"] * 3, 2), Server(url))
        assert time.perf_counter() - begin < 10


def test_each_request_shows_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_API_KEY", " one , two")
    headers = AddressFlags().server().headers
    assert headers == {"Content-Type": "application/json", "Authorization": "Bearer one"}
    monkeypatch.delenv("OUTPACE_API_KEY")
    assert "Authorization" not in AddressFlags().server().headers


TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'


@contextmanager
def answering(answers: Iterator[bytes | int]) -> Iterator[str]:
    """The address of a server whose completions are these: a body, or a status."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            found = b"{}" if self.path == "/forget" else next(answers)
            self.send_response(found if isinstance(found, int) else 200)
            self.end_headers()
            self.wfile.write(b"too busy" if isinstance(found, int) else found)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (TOKEN, "broke off"),
        (TOKEN + b'data: {"usage": {}}\n\n', "broke off"),
        (b"data: {no json}\n\n", "no JSON"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"error": "out of memory"}\n\n', "out of memory"),
    ],
)
def test_an_answer_that_does_not_come_to_its_end_is_no_answer(answer: bytes, said: str) -> None:
    """Else it would count as a text without tokens that was served well."""
    with (
        answering(repeat(answer)) as url,
        pytest.raises(ConfigError, match=f"1 of 1 requests.*{said}"),
    ):
        run_clients(Clients(["a"], 1), Server(url))


WELL = TOKEN + USAGE
COUNTED = ["--num-requests", "3", "--repeats", "2", "--clients"]


def bench(url: str, file: Path, *words: str) -> Any:
    asked = ["bench", "serve", "--url", url, "--json", str(file), *COUNTED, *words]
    return CliRunner().invoke(app, asked)


def test_a_request_that_fails_loses_nothing_but_itself(tmp_path: Path) -> None:
    warm_up, off, auto = [WELL] * 6, [WELL, 429, WELL], [WELL] * 3
    with answering(iter([*warm_up, *off, *auto, *auto, *off])) as url:
        done = bench(url, tmp_path / "found.json", "1")
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    failed = {kind: [turn["failed requests"] for turn in found[kind]["1"]] for kind in found}
    assert failed == {"off": [1, 1], "auto": [0, 0]}
    said = " ".join(done.stdout.split())
    for turn in (1, 2):
        assert f"off, run {turn}: 1 of 3 requests failed (the first: status 429: too busy)" in said
    with answering(iter([WELL] * 5 + [429])) as url:
        done = bench(url, tmp_path / "none.json", "1")
    assert done.exit_code == 2, "a request of the warm-up has failed: nothing is measured yet"
    assert not (tmp_path / "none.json").exists()


def test_a_server_that_dies_loses_none_of_the_turns_before(tmp_path: Path) -> None:
    first = [WELL] * (3 * 2 * 3)  # the warm-up and two turns with one client
    with answering(chain(first, [WELL] * 6, [WELL] * 6, repeat(503))) as url:
        done = bench(url, tmp_path / "found.json", "1,2")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "3 of 3 requests failed (the first: status 503: too busy)" in said
    assert "what was measured before it stopped is above" in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    turns = {kind: {count: len(each) for count, each in found[kind].items()} for kind in found}
    assert turns == {"off": {"1": 2, "2": 1}, "auto": {"1": 2, "2": 1}}
    assert "2 clients" in done.stdout
