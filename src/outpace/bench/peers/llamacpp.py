"""llama.cpp and ik_llama.cpp as contestants on CPUs: plain, and speculative with a draft model, on
GGUF files. A ``llama-server`` process of either is asked over HTTP on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import torch

from outpace.bench.contest import BatchJob, BatchTexts, Contestant
from outpace.bench.peers.registry import Models, drafter_of, is_gguf
from outpace.errors import ConfigError

HOST = "127.0.0.1"
CONTEXT = 8192
"""Longest prompt and text together."""
STARTING_SECONDS = 300
ANSWER_SECONDS = 1800


@dataclass(frozen=True)
class Program:
    """One of the servers that grew from llama.cpp, and how its command line differs."""

    name: str
    """As a peer, and the beginning of its contestants' names."""
    title: str
    file: str
    """Name of the executable on the path."""
    variable: str
    """Environment variable that names the executable instead."""
    options: tuple[str, ...]
    drafting: str
    """Options of a draft model, with ``{count}`` for the number of drafted tokens."""

    @property
    def path(self) -> str:
        """Path of the executable; ``ConfigError`` with the remedy if there is none."""
        found = shutil.which(os.environ.get(self.variable) or self.file)
        if found is None:
            raise ConfigError(
                f"the {self.title} peer needs its program llama-server: build it on this machine "
                f"(cmake -DGGML_NATIVE=ON), and put it on the path as {self.file} or name it in "
                f"{self.variable}."
            )
        return found

    def command(
        self, target: str, drafter: str | None, drafted: int, threads: int, port: int
    ) -> list[str]:
        """Returns the command of a server with one model, and maybe a draft model."""
        found = [self.path, "-m", target, "--host", HOST, "--port", str(port)]
        found += ["-t", str(threads), "-tb", str(threads), "-c", str(CONTEXT), "-np", "1"]
        found += ["--cache-ram", "0", *self.options]
        if drafter is not None:
            found += ["-md", drafter, *self.drafting.format(count=drafted).split()]
        return found


LLAMA_CPP = Program(
    name="llamacpp",
    title="llama.cpp",
    file="llama-server",
    variable="OUTPACE_LLAMA_SERVER",
    options=("--device", "none"),
    drafting="--spec-draft-device none --spec-type draft-simple --spec-draft-n-max {count}",
)
IK_LLAMA_CPP = Program(
    name="ik_llamacpp",
    title="ik_llama.cpp",
    file="ik-llama-server",
    variable="OUTPACE_IK_LLAMA_SERVER",
    options=("--run-time-repack",),  # rows of weights interleaved: its faster passes
    drafting="--spec-type draft:n_max={count}",
)


class LlamaServer:
    """A running server with one model, and a drafter if ``drafted`` says how many tokens it drafts.

    The process ends with this object.
    """

    def __init__(
        self, program: Program, target: str, drafter: str | None, drafted: int, threads: int
    ) -> None:
        self._port = _free_port()
        command = program.command(target, drafter, drafted, threads, self._port)
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115  # lives as long as it
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        self._end = weakref.finalize(self, _stop, self._process)
        self._wait()

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the server's answer to one request for a text, as its ``/completion`` gives it.

        Raises ``ConfigError`` where it refuses the request or has ended.
        """
        return self._answer("/completion", options)

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Returns a text in the model's tokens. special: with those that begin a prompt."""
        asked = {"content": text, "add_special": special, "parse_special": True}
        found: list[int] = self._answer("/tokenize", asked)["tokens"]
        return found

    def close(self) -> None:
        """Ends the process."""
        self._end()
        self._log.close()

    def _answer(self, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            status, answer = self._ask("POST", path, json.dumps(options))
        except (OSError, HTTPException) as error:
            raise ConfigError(f"llama-server does not answer ({error}): {self._last()}") from error
        if status != 200:
            raise ConfigError(f"llama-server refuses the request: {answer}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = HTTPConnection(HOST, self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _wait(self) -> None:
        """Returns once the model is loaded; ``ConfigError`` if the process ends before."""
        end = time.monotonic() + STARTING_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ConfigError(f"llama-server does not start: {self._last()}")
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except (OSError, HTTPException):
                pass  # it does not listen yet
            time.sleep(0.1)
        self._end()
        raise ConfigError(f"llama-server was not ready after {STARTING_SECONDS} s: {self._last()}")

    def _last(self) -> str:
        """The last line of its log that says something is wrong, else its last line."""
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines() or ["no log"]
        wrong = [line for line in lines if "error" in line.lower()]
        return (wrong or lines)[-1].strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def samples(tokens: Sequence[int], count: int, temperature: float, seed: int) -> dict[str, Any]:
    """Returns a request for exactly n tokens, by the distribution at this temperature alone."""
    return {
        "prompt": list(tokens),
        "n_predict": count,
        "ignore_eos": True,
        "temperature": temperature,
        "samplers": ["temperature"],
        "repeat_penalty": 1.0,
        "seed": seed,
        "return_tokens": True,
        "cache_prompt": False,
    }


# -- contestants -------------------------------------------------------------------------------


UNKNOWN = -1
"""Stands for a token that a program does not show; no vocabulary has it."""


class LlamaCpp(Contestant):
    """One server. Its cache holds 16-bit floats and its products round activations to 8 bits, both
    by its own defaults."""

    def __init__(self, program: Program, server: LlamaServer, count: int | None) -> None:
        self.name = program.name if count is None else f"{program.name}-speculative-{count}"
        self.what = f"{program.title}, {'plain' if count is None else f'{count} draft tokens'}"
        self._program, self._server, self._count = program, server, count

    def refusal(self, batch: int, temperature: float) -> str | None:
        return f"{self._program.title} is run with one text at a time here" if batch > 1 else None

    def run(self, job: BatchJob) -> BatchTexts:
        (prompt,) = job.prompts
        if len(prompt) + job.max_tokens > CONTEXT:
            raise ConfigError(
                f"{self._program.title} is run with a context of {CONTEXT} tokens here: lower "
                "--max-tokens or --max-prompt-tokens."
            )
        found = self._server.complete(samples(prompt, job.max_tokens, job.temperature, job.seed))
        drafted = found.get("timings", {}).get("draft_n")
        if self._count is not None and job.max_tokens > 2 and not drafted:
            raise ConfigError(
                f"{self._program.title} drafted nothing, and what it does plainly must not be "
                f"called speculative: take a newer llama-server, or leave {self.name!r} out of "
                "--vs."
            )
        tokens = found.get("tokens")
        if not tokens:
            tokens = self._read_again(str(found["content"]), int(found["tokens_predicted"]))
        return BatchTexts([[int(token) for token in tokens]])

    def _read_again(self, text: str, count: int) -> list[int]:
        """Returns the tokens of a text by a program that says only how many it made. Read again,
        the text may have more or fewer tokens: what is missing counts as another token."""
        tokens = self._server.tokens(text, special=False)[:count]
        return tokens + [UNKNOWN] * (count - len(tokens))


def llamacpp(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns llama.cpp, plain or with a number of draft tokens, as each variant says."""
    return _contestants(LLAMA_CPP, models, variants)


def ik_llamacpp(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns the same of ik_llama.cpp."""
    return _contestants(IK_LLAMA_CPP, models, variants)


def _contestants(program: Program, models: Models, variants: Sequence[str]) -> list[Contestant]:
    _ = program.path  # the remedy comes before a model is loaded
    for path in filter(None, (models.target, models.drafter)):
        if not is_gguf(path):
            raise ConfigError(
                f"{program.title} reads GGUF files, and this run's model is {path!r}: give a .gguf "
                f"file, or leave {program.name!r} out of --vs."
            )
    if models.device != "cpu":
        raise ConfigError(
            f"the {program.title} peer runs on the CPU, and this run is on {models.device}: leave "
            f"{program.name!r} out of --vs."
        )
    threads = torch.get_num_threads()
    found: list[Contestant] = []
    for variant in variants:
        if variant == "plain":
            server = LlamaServer(program, models.target, None, 0, threads)
            found.append(LlamaCpp(program, server, None))
        else:
            count = int(variant.removeprefix("speculative-"))
            drafter = drafter_of(models, program.title)
            server = LlamaServer(program, models.target, drafter, count, threads)
            found.append(LlamaCpp(program, server, count))
    return found
