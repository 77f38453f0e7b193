"""OpenAI's batch files: each line is answered as the server would, and the answer is kept at once.

What was answered is read from the answers alone: the id of each holds the number of its line and a
hash of it. So a job that was killed goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout

from outpace.core.strict_json import members
from outpace.core.values import shown
from outpace.errors import ConfigError, ProcessLost
from outpace.heads.folder import saving
from outpace.serve.in_process import InProcess

WINDOW = 4096
"""Lines that are ordered together, at most."""
WINDOW_BYTES = 64 << 20
ALIKE = 256
"""Prompts begin alike if as many of their characters are equal."""
LONGEST_ENVELOPE = 1 << 16
"""Bytes that a line may have besides its body."""

FIELDS = frozenset({"custom_id", "method", "url", "body"})
BOM = b"\xef\xbb\xbf"
_AS_WRITTEN = json.JSONDecoder()
"""Takes NaN too: what a body may hold, the server says."""
_BEGIN = b'{"id": "batch_req_'
"""How the line of an answer begins."""
_ID = re.compile(r"batch_req_([0-9]+)_([0-9a-f]{16})")


# -- a line ----------------------------------------------------------------------------------------


class BadLine(Exception):
    """A line that cannot be sent. code: OpenAI's name for the fault, or one like it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True)
class Line:
    """One line of a file of requests; its body is as it was written, so that the server reads what
    its user wrote."""

    number: int
    """From 1."""
    raw: bytes
    offset: int = 0
    """Where in its file it begins."""

    @property
    def id(self) -> str:
        """The id of its answer."""
        return f"batch_req_{self.number}_{self.hash:016x}"

    @property
    def hash(self) -> int:
        """64 bits that another line has with a probability of 2^-64."""
        return hash_of(self.raw)

    def fields(self) -> Fields:
        """Returns what is written in it; raises `BadLine`."""
        try:
            found = list(members(self.raw.decode(), _AS_WRITTEN))
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            raise BadLine("invalid_json_line", f"the line is no JSON object: {reason}.") from error
        fields = Fields({name: (value, written) for name, value, written in found})
        if len(fields.members) < len(found):
            raise BadLine("invalid_json_line", "the line holds a field twice: send it once.")
        for name in fields.members.keys() - FIELDS:
            raise BadLine(
                "unknown_parameter", f"{shown(name)} is no field of a line: leave it out."
            )
        return fields


@dataclass(frozen=True)
class Fields:
    """The fields of a line: by name, the value of each, and how that is written."""

    members: Mapping[str, tuple[Any, str]]

    def custom_id(self) -> str:
        """Returns how its user calls it; raises `BadLine`."""
        found = self._value("custom_id")
        if not (isinstance(found, str) and found and _is_text(found)):
            raise BadLine("invalid_custom_id", "custom_id has to be a text.", "custom_id")
        return found

    def request(self) -> tuple[str, bytes]:
        """Returns the endpoint and the body; raises `BadLine`."""
        if self._value("method") != "POST":
            raise BadLine("invalid_method", 'method has to be "POST".', "method")
        url = self._value("url")
        if not (isinstance(url, str) and url.startswith("/") and _is_text(url)):
            raise BadLine(
                "invalid_url", "url has to be a path, such as /v1/chat/completions.", "url"
            )
        body = self._value("body")
        if not isinstance(body, dict):
            raise BadLine("invalid_body", "body has to be an object.", "body")
        if body.get("stream") is True:
            raise BadLine("invalid_body", "a batch is answered whole: leave stream out.", "stream")
        return url, self.members["body"][1].encode()

    def prompt(self) -> str:
        """Returns what its text goes on from, as written; "" where that is not known."""
        body, written = self.members.get("body", (None, ""))
        if not isinstance(body, dict):
            return ""
        found = {name: text for name, _, text in members(written, _AS_WRITTEN)}
        return "".join(found.get(name, "") for name in ("tools", "messages", "prompt"))

    def _value(self, name: str) -> Any:
        return self.members.get(name, (None, ""))[0]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character, which no file can hold
        return False
    return True


def hash_of(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


# -- the file of requests --------------------------------------------------------------------------


class Requests:
    """A file of requests, read from its beginning as often as needed, and held in no more memory
    than a window of lines and a few bytes for each line. Blank lines are none."""

    def __init__(self, path: Path, max_body_bytes: int) -> None:
        """Reads all lines once. ``ConfigError`` for what is no file."""
        self.path = path
        self.longest = max_body_bytes + LONGEST_ENVELOPE
        if not path.is_file():
            raise ConfigError(f"there is no file {str(path)!r} to read requests from.")
        hashes, names = array("Q"), array("Q")
        self.total = 0
        for line in self:
            hashes.extend([0] * (line.number - len(hashes)))
            hashes.append(line.hash)
            self.total += 1
            with suppress(BadLine):
                name = hash_of(line.fields().custom_id().encode())
                names.extend([line.number, name])
        if not self.total:
            raise ConfigError(f"{str(path)!r} holds no request: give one a line.")
        self._hashes = hashes
        self._repeated = _repeated(np.array(names, np.uint64).reshape(-1, 2))
        self._done = bytearray(len(hashes))

    def __iter__(self) -> Iterator[Line]:
        number = offset = 0
        with self.path.open("rb") as file:
            while raw := file.readline(self.longest + 1):
                number += 1
                if raw.strip():
                    yield _line(number, offset, raw)
                offset += len(raw)
                while len(raw) > self.longest and not raw.endswith(b"\n"):  # the rest of a long one
                    raw = file.readline(self.longest + 1)
                    offset += len(raw)

    @property
    def left(self) -> int:
        """How many lines have no answer."""
        return self.total - sum(self._done)

    def holds(self, number: int, hash: int) -> bool:
        """Whether a line has a number and a hash."""
        return 0 < number < len(self._hashes) and self._hashes[number] == hash

    def is_done(self, number: int) -> bool:
        """Whether a line has an answer."""
        return bool(self._done[number])

    def repeats(self, number: int) -> bool:
        """Whether an earlier line has the custom_id of a line."""
        return number in self._repeated

    def note(self, number: int) -> None:
        """Notes that a line has its answer."""
        self._done[number] = 1

    def ordered(self) -> Iterator[Line]:
        """Yields the lines without an answer, those of a window in the order in which they are
        written fastest."""
        window: list[Line] = []
        size = 0
        for line in self:
            if not self.holds(line.number, line.hash):
                raise ConfigError(
                    f"{str(self.path)!r} was changed meanwhile: start the same command again."
                )
            if self.is_done(line.number):
                continue
            window.append(line)
            size += len(line.raw)
            if len(window) >= WINDOW or size >= WINDOW_BYTES:
                yield from in_order(window)
                window, size = [], 0
        yield from in_order(window)


def line_at(path: Path, number: int, offset: int, longest: int) -> Line:
    """Returns a line of a file from what `Requests` says of it."""
    with path.open("rb") as file:
        file.seek(offset)
        return _line(number, offset, file.readline(longest + 1))


def _line(number: int, offset: int, raw: bytes) -> Line:
    raw = raw.rstrip(b"\r\n")  # the last line may get its end later
    return Line(number, raw.removeprefix(BOM) if number == 1 else raw, offset)


def in_order(lines: Sequence[Line]) -> Iterator[Line]:
    """Yields lines, those with long prompts first, so that at the end short texts are left, and
    those whose prompts begin alike after each other, so that the prefix cache holds the beginning.
    """
    prompts = sorted(((_prompt(line), line) for line in lines), key=lambda pair: pair[0])
    alike = [list(group) for _, group in groupby(prompts, key=lambda pair: pair[0][:ALIKE])]
    for group in sorted(alike, key=lambda group: -max(len(prompt) for prompt, _ in group)):
        yield from (line for _, line in group)


def _prompt(line: Line) -> str:
    try:
        return line.fields().prompt()
    except BadLine:
        return ""


def _repeated(named: np.ndarray) -> set[int]:  # [N, 2]: number, hash of the name
    """Returns the numbers of lines that have the name of an earlier one."""
    named = named[named[:, 1].argsort(kind="stable")]
    again = named[1:, 1] == named[:-1, 1]
    return set(named[1:, 0][again].tolist())


# -- answers ---------------------------------------------------------------------------------------


class Answers:
    """A file of answers, to which they are added as they come. What it holds of an earlier run is
    done; half an answer at its end is cut off.

    model: the name of the model that writes. Raises ``ConfigError`` for a file that holds something
    else than answers of this model to these requests, and where another process writes into it.
    """

    def __init__(self, path: Path, requests: Requests, model: str) -> None:
        self.path = path
        self.count = 0
        self.failed = 0
        self.first_failure = ""
        self.tokens = 0
        self._requests = requests
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {str(path.parent)!r} to write answers into.")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{str(path)!r} is no file: answers are read again from theirs.")
        with ExitStack() as opened:
            try:
                opened.enter_context(FileLock(path.with_name(f".{path.name}.lock"), timeout=0))
            except Timeout:
                raise ConfigError(
                    f"another outpace batch writes into {str(path)!r}: wait until it has ended, or "
                    "name another file."
                ) from None
            self._file = opened.enter_context(path.open("a+b"))
            self._file.seek(0)
            size = self._read(self._file, model)
            self._file.truncate(size)
            self._file.seek(max(0, size - 1))
            if self._file.read() not in (b"", b"\n"):  # an editor has left the last one out
                self._file.write(b"\n")
            self._opened = opened.pop_all()
        self.tokens = 0  # of this run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with saving(self.path):
            self._opened.close()

    def add(self, answer: bytes) -> None:
        """Writes one answer, unless the line has one: what is tried again may come twice."""
        record = json.loads(answer)
        if self._requests.is_done(_number_of(record)):
            return
        with saving(self.path):
            self._file.write(answer)
            self._file.flush()  # to the system, which keeps it whatever becomes of the process
        self._note(record)

    def _read(self, lines: Iterable[bytes], model: str) -> int:
        """Notes the answers that there are; returns the bytes of all whole lines."""
        size = 0
        for raw in lines:
            ended = raw.endswith(b"\n") or _is_json(raw)
            if not ended and _BEGIN.startswith(raw[: len(_BEGIN)]):
                break  # an answer that was not written to its end
            size += len(raw)
            try:
                record = json.loads(raw)
                wrong = self._fault(record, model)
                if not wrong:
                    self._note(record)
            except (ValueError, LookupError, TypeError, AttributeError):
                wrong = "what is no answer of outpace batch"
            if wrong:
                raise ConfigError(
                    f"{str(self.path)!r} holds {wrong}: name another file, or delete this one."
                )
        return size

    def _fault(self, record: Any, model: str) -> str | None:
        """What an answer is that does not belong here; None for one that does."""
        found = _ID.fullmatch(record["id"])
        if found is None:
            return "what is no answer of outpace batch"
        if not self._requests.holds(int(found[1]), int(found[2], 16)):
            return f"an answer to a line that {str(self._requests.path)!r} does not hold"
        written = ((record["response"] or {}).get("body") or {}).get("model", model)
        return None if written == model else f"an answer of another model, {written!r}"

    def _note(self, record: Any) -> None:
        number = _number_of(record)
        response, error = record["response"], record["error"]
        if response and response["status_code"] != 200:
            error = response["body"]["error"]
        if error:
            self.failed += 1
            self.first_failure = self.first_failure or f"line {number}: {error['message']}"
        else:
            self.tokens += response["body"].get("usage", {}).get("completion_tokens", 0)
        self._requests.note(number)
        self.count += 1


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def _number_of(record: Any) -> int:
    """Returns the number of the line that an answer is of."""
    found = _ID.fullmatch(record["id"])
    assert found is not None
    return int(found[1])


async def answer(server: InProcess, line: Line, repeats: bool, longest: int) -> bytes:
    """Returns the answer to a line, as a line. repeats: an earlier one has its custom_id. longest:
    bytes that it may have. Raises ``ProcessLost`` where nothing can be computed any more."""
    name = response = error = None
    try:
        if len(line.raw) > longest:
            raise BadLine("line_too_long", f"the line is longer than {longest} bytes: send less.")
        fields = line.fields()
        name = fields.custom_id()
        if repeats:
            raise BadLine("duplicate_custom_id", "an earlier line has its custom_id.", "custom_id")
        path, body = fields.request()
        answered = await server.ask(path, body)
        if answered.status == 503:
            raise ProcessLost(answered.body["error"]["message"])
        response = {
            "status_code": answered.status,
            "request_id": answered.request_id,
            "body": answered.body,
        }
    except BadLine as bad:
        error = {"code": bad.code, "message": str(bad), "param": bad.param, "line": line.number}
    record = {"id": line.id, "custom_id": name, "response": response, "error": error}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


async def run(
    server: InProcess, requests: Requests, answers: Answers, report: Callable[[], None]
) -> None:
    """Answers all lines that have no answer. report: is called after each."""
    lines = requests.ordered()

    async def ask() -> None:
        for line in lines:
            answers.add(await answer(server, line, requests.repeats(line.number), requests.longest))
            report()

    async with server.started():
        # Twice as many as are written at once: a row that is free finds a text that waits.
        asking = [asyncio.ensure_future(ask()) for _ in range(2 * server.rows)]
        try:
            # Not gather: a KeyboardInterrupt in one of them would end this task with it, and the
            # loop before the threads of the server are stopped.
            ended, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        for one in ended:
            one.result()
