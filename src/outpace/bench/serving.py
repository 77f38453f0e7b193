"""Load on a running server, and what each request waits for: requests that arrive at random times,
or clients of which each sends its next request once the last one is answered.

TTFT   time to the first token, from when the request is sent
TPOT   time per output token after those that came first: one event may hold several. Texts
       that came all at once have none; where all have, it is 0
goodput  requests per second whose TTFT and TPOT were within the limits
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from outpace.bench.statistics import Interval, interval_of
from outpace.errors import ConfigError

TIMEOUT = 600.0
"""Seconds without a sign of life after which a request counts as failed."""


@dataclass(frozen=True)
class Requests:
    """What is asked for: one text per prompt."""

    prompts: Sequence[str]
    _: KW_ONLY
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Load(Requests):
    """``rate`` requests are sent per second on average.

    The gaps between them are exponential and follow from the seed, so that two runs see the same
    arrivals.
    """

    rate: float

    def __post_init__(self) -> None:
        if not self.rate > 0:  # nor NaN
            raise ConfigError(f"the rate must be positive, not {self.rate:g}.")

    def arrivals(self) -> list[float]:
        """Returns when each request is sent, in seconds from the start."""
        draws = random.Random(self.seed)
        return list(accumulate(draws.expovariate(self.rate) for _ in self.prompts))


@dataclass(frozen=True)
class Clients(Requests):
    """``count`` clients that share the prompts; each has one request open at any time."""

    count: int

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise ConfigError(f"there must be at least one client, not {self.count}.")
        if self.count > len(self.prompts):
            raise ConfigError(
                f"{self.count} clients need a prompt each, and there are {len(self.prompts)}: give "
                "more prompts, or fewer clients."
            )


@dataclass(frozen=True)
class Server:
    """A running server, and the limits within which a request counts as served well."""

    url: str
    first_seconds: float = 1.0
    token_seconds: float = 0.1
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What comes with each request."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}

    def connect(self) -> http.client.HTTPConnection:
        """Returns a connection; ``ConfigError`` for what is no address."""
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:  # brackets or a port that cannot be read
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"{self.url} is no address: give one such as http://127.0.0.1:8000.")
        if parts.path.strip("/") or parts.query:
            raise ConfigError(
                f"{self.url} goes on after the server's name: give the part up to "
                f"{parts.netloc!r}, to which /v1/completions is added."
            )
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(host, port, timeout=TIMEOUT)

    def forget(self) -> None:
        """Lets the server forget the texts of earlier requests: a look-up would draft an answer
        from its own first version, and a prompt would be read from the prefix cache.

        Raises ``ConfigError`` where it cannot be reached, or does not do that.
        """
        connection = self.connect()
        try:
            connection.request("POST", "/forget", "{}", self.headers)
            answer = connection.getresponse()
            said = answer.read(300).decode(errors="replace")
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"no server answers at {self.url} ({reason}): start one with 'outpace serve "
                "--allow-forget', or give its address with --url."
            ) from error
        finally:
            connection.close()
        if answer.status == 404:
            raise ConfigError(
                f"the server at {self.url} would remember texts of one run in the next one: start "
                "it with --allow-forget."
            )
        if answer.status != 200:
            raise ConfigError(f"the server at {self.url} cannot forget texts: {said}")


@dataclass(frozen=True)
class Served:
    """One answered request; times in seconds since the load began."""

    sent: float
    first: float
    last: float
    tokens: int
    first_tokens: int = 1
    """Tokens that came at ``first``."""

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - self.first_tokens)


@dataclass(frozen=True)
class Run:
    """What came of the requests of one run."""

    served: Sequence[Served]
    """Those that were answered."""
    problems: Sequence[str] = ()
    """Why each of the others was not."""
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """How many failed, why, and what to do."""
        count = len(self.problems)
        return (
            f"{count} of {count + len(self.served)} requests failed (the first: "
            f"{self.problems[0]}): {self.remedy}"
        )

    def check(self) -> Run:
        """Returns itself; ``ConfigError`` if a request has failed."""
        if self.problems:
            raise ConfigError(self.sentence)
        return self


def run_load(load: Load, server: Server, speculative: str = "auto") -> Run:
    """Sends the requests and returns what came of them, once all have ended.

    speculative: what each asks for: "off", "auto", or a number of tokens. Raises ``ConfigError``
    where none is answered: the server cannot be reached, or refuses them.
    """
    answers = _Answers(server, load, speculative)
    threads = []
    for at, prompt in zip(load.arrivals(), load.prompts, strict=True):
        time.sleep(max(0.0, answers.begin + at - time.perf_counter()))
        threads.append(_started(answers.ask, [prompt]))
    return answers.all(threads)


def run_clients(clients: Clients, server: Server, speculative: str = "auto") -> Run:
    """The same for clients that wait for their answers."""
    answers = _Answers(server, clients, speculative)
    prompts = iter(clients.prompts)  # each goes to the client that asks for one first
    return answers.all([_started(answers.ask, prompts) for _ in range(clients.count)])


def _started(ask: Callable[[Iterable[str]], None], prompts: Iterable[str]) -> threading.Thread:
    """Returns a thread that asks. Nothing waits for it to end, so that Ctrl-C does not either."""
    thread = threading.Thread(target=ask, args=(prompts,), daemon=True)
    thread.start()
    return thread


class _Answers:
    """Asks one prompt after another, from any thread, and collects what came of it."""

    def __init__(self, server: Server, load: Requests, speculative: str) -> None:
        self._server, self._load, self._speculative = server, load, speculative
        self._found: list[Served] = []
        self._problems: list[str] = []
        self._unreachable = False
        self.begin = time.perf_counter()

    def ask(self, prompts: Iterable[str]) -> None:
        for prompt in prompts:
            try:
                body = _body(self._load, prompt, self._speculative)
                self._found.append(_served(self._server, body, self.begin))
            except (OSError, http.client.HTTPException, ConfigError) as error:
                self._problems.append(str(error))
                self._unreachable |= isinstance(error, OSError)

    def all(self, threads: Iterable[threading.Thread]) -> Run:
        """Returns what came of the requests, once the threads that ask have ended;
        ``ConfigError`` if none was answered."""
        for thread in threads:
            thread.join()
        remedy = (
            f"start a server at {self._server.url} with 'outpace serve', or give its address."
            if self._unreachable
            else "send less (--rate, --clients), or start the server with higher limits."
        )
        run = Run(self._found, self._problems, remedy)
        return run if self._found else run.check()


def summary(run: Run, server: Server) -> dict[str, float]:
    """Returns the figures of the requests that were answered, percentiles in seconds, tokens and
    good requests per second, and how many failed."""
    served = run.served
    whole = max(one.last for one in served) - min(one.sent for one in served)
    good = sum(
        one.ttft <= server.first_seconds and one.tpot <= server.token_seconds for one in served
    )
    later = [one.tpot for one in served if one.tokens > one.first_tokens]
    figures = {
        "TTFT": [one.ttft for one in served],
        "TPOT": later or [0.0],  # of texts that came all at once there is none
        "latency": [one.last - one.sent for one in served],
    }
    found = {
        f"{name} p{percent} (s)": float(np.percentile(values, percent))
        for name, values in figures.items()
        for percent in (50, 90, 99)
    }
    found["tokens/s"] = sum(one.tokens for one in served) / whole
    found["requests/s"] = len(served) / whole
    found["goodput (requests/s)"] = good / whole
    found["failed requests"] = len(run.problems)
    return found


@dataclass(frozen=True)
class Turns:
    """Runs of several kinds of requests in turns."""

    figures: Mapping[str, Sequence[Mapping[str, float]]]
    """By kind, the `summary` of each turn; the last turn may lack some kinds."""
    notes: Sequence[str] = ()
    """What went wrong in some turns, a sentence each."""
    stopped: BaseException | None = None
    """What has ended them before the last turn, if that was not reached."""

    def medians(self) -> dict[str, dict[str, float]]:
        """Returns, by kind, the median of each figure over the turns, where there are any."""
        return {
            kind: {name: float(np.median([turn[name] for turn in turns])) for name in turns[0]}
            for kind, turns in self.figures.items()
            if turns
        }

    def ratios(self, name: str) -> dict[str, Interval]:
        """Returns, by kind, a figure over that of the first kind in the same turn: the geometric
        mean over the turns that both have, with its interval."""
        first = next(iter(self.figures.values()))
        pairs = {
            kind: list(zip(turns, first, strict=False)) for kind, turns in self.figures.items()
        }
        return {
            kind: interval_of([turn[name] / base[name] for turn, base in both])
            for kind, both in pairs.items()
            if both
        }


def _body(load: Requests, prompt: str, speculative: str) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.seed,
        "speculative": int(speculative) if speculative.isdecimal() else speculative,
        "stream": True,
        "stream_options": {"include_usage": True},
        "outpace": {"counts": True},
    }


def _served(server: Server, body: dict[str, Any], begin: float) -> Served:
    connection = server.connect()
    try:
        sent = time.perf_counter() - begin
        connection.request("POST", "/v1/completions", json.dumps(body), server.headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConfigError(
                f"status {answer.status}: {answer.read(300).decode(errors='replace')}"
            )
        return _read(answer, sent, begin)
    finally:
        connection.close()


def _read(answer: http.client.HTTPResponse, sent: float, begin: float) -> Served:
    """Returns the times of a streamed answer; ``ConfigError`` where it holds an error, or ends
    before it has said how many tokens it has."""
    first = last = sent
    tokens: int | None = None
    first_tokens = 1
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = _event(line)
        if (error := event.get("error")) is not None:
            raise ConfigError(str(error.get("message") if isinstance(error, dict) else error))
        if event.get("choices"):
            last = time.perf_counter() - begin
            if first == sent:
                first, first_tokens = last, event.get("outpace", {}).get("tokens", 1)
        elif usage := event.get("usage"):
            tokens = usage.get("completion_tokens")
    if tokens is None:
        raise ConfigError("an answer broke off, or has no count of its tokens ('usage')")
    return Served(sent, first, last, tokens, first_tokens)


def _event(line: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    except ValueError as error:
        raise ConfigError(f"an answer holds what is no JSON ({error})") from error
    return event
