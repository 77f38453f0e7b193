"""Text files, which all are UTF-8, with a byte order mark or without; the records of JSON files,
which all readers of texts and prompts find in the same way; and how files are replaced."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from outpace.errors import OutpaceError, PromptError

Error = Callable[[str], OutpaceError]
"""Makes the error that is raised, of its sentence."""


def read_text(file: Path, what: str = "file", *, error: Error = PromptError) -> str:
    """Returns the text of a file; raises ``error`` where it cannot be read, or is not UTF-8.

    what: the kind of file, for the sentence.
    """
    try:
        data = file.read_bytes()
    except OSError as cause:
        raise _unreadable(file, what, cause, error) from cause
    return decoded(data, str(file), error=error)


def pieces(
    file: Path, size: int, what: str = "file", *, error: Error = PromptError
) -> Iterator[str]:
    """Yields the text of a long file piece by piece, and raises as `read_text` does.

    Each piece has ``size`` bytes and what is left of their last line. A size of 0 yields single
    lines. Lines end at line breaks only, which they keep: JSON may hold other separators of
    Unicode.
    """
    at = 0
    try:
        with file.open("rb") as opened:
            while data := opened.read(size) + opened.readline():
                if text := decoded(data, str(file), at, error=error):
                    yield text
                at += len(data)
    except OSError as cause:
        raise _unreadable(file, what, cause, error) from cause


def decoded(data: bytes, source: str, at: int = 0, *, error: Error = PromptError) -> str:
    """Returns what some bytes of a source say; raises ``error`` where they are not UTF-8.

    at: the offset of the bytes in their source.
    """
    try:
        return (data if at else data.removeprefix(BOM_UTF8)).decode()
    except UnicodeDecodeError as cause:
        byte, start = cause.object[cause.start], at + len(data) - len(cause.object) + cause.start
        raise error(
            f"{source} is not UTF-8 text: byte {byte:#04x} at offset {start} cannot be read; save "
            "it as UTF-8."
        ) from cause


def _unreadable(file: Path, what: str, cause: OSError, error: Error) -> OutpaceError:
    return error(f"cannot read {what} {str(file)!r}: {cause.strerror}.")


PART = ".part"
"""The end of the name of a file that is still being written."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Returns a context that yields where to write a file, which takes its place when the context
    ends: a reader never finds half of one, and neither Ctrl-C nor a full disk loses the former one.

    The place has a name of its own, since several processes may write the same file. A link stays
    one, and who may read the file stays as it was. What cannot be replaced is written itself: a
    pipe, ``/dev/null``, a file in a folder that is read-only.
    """
    given, path = path, Path(os.path.realpath(path))
    writable = os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)
    if given.exists() and not (given.is_file() and writable):
        yield given
        return
    part = path.with_name(f"{path.name}.{token_hex(4)}{PART}")
    try:
        if path.exists():  # nobody reads the part who may not read the file
            part.touch(0o600)
        yield part
        _put_in_place(part, path)
    finally:
        part.unlink(missing_ok=True)


def _put_in_place(part: Path, path: Path) -> None:
    if path.exists():
        with suppress(OSError):  # of a file system without modes
            shutil.copymode(path, part)
    try:
        part.replace(path)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is mounted by itself keeps its place
            raise
        shutil.copyfile(part, path)


def remove_parts(path: Path) -> None:
    """Removes what processes that were killed while they wrote a file have left."""
    for part in path.parent.glob(f"{glob.escape(path.name)}*{PART}"):
        part.unlink(missing_ok=True)


# -- records of JSON files -------------------------------------------------------------------------

WHOLE = ".json"
"""A file that is one value as a whole, or has lines in spite of its name."""

SUFFIXES = (".jsonl", ".ndjson", WHOLE)

PROMPT = '{"prompt": ...}'
"""A record with a prompt, as errors show it."""

ROLES = dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant") | {"human": "user"}
"""Names of roles in the ShareGPT format, and what chat templates call them."""


@dataclass(frozen=True)
class Record:
    """What stands in one line of a file, or at one place of its array."""

    value: Any
    number: int
    """From 1."""
    where: str
    """The file and the place, for errors."""


def holds_records(file: Path) -> bool:
    """Tells whether a file holds records, and not a text."""
    return file.suffix.lower() in SUFFIXES


def records(lines: Iterable[str], file: Path, form: str = "record") -> Iterator[Record]:
    """Yields the records of a file.

    Each line is one. A .json file may also be an array of records, or a single one, however they
    are spread over its lines; it is read as a whole. form: what a record looks like, for errors.
    Raises ``PromptError`` for what is not JSON.
    """
    if file.suffix.lower() == WHOLE:
        lines = list(lines)
        whole = _whole(lines, file, form)
        if whole is not None:
            yield from whole
            return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _of_line(line, number, f"{file}, line {number}", form)


def no_prompt(file: Path, form: str = PROMPT) -> PromptError:
    """Returns the error for a file without any prompt. form: what one looks like."""
    return PromptError(f"{file} holds no prompt: give one {form} per line.")


def question(record: Mapping[str, Any], asked: str) -> str:
    """Returns the text under a name, and after it what it is about: Dolly keeps that as "context"
    by itself, and Alpaca as the "input" of an "instruction"."""
    about = record.get("context") or (asked == "instruction" and record.get("input"))
    return "\n".join(filter(None, [record[asked], str(about or "")]))


def _whole(lines: Sequence[str], file: Path, form: str) -> list[Record] | None:
    """The records of a file that is one value; None if its lines are values by themselves."""
    try:
        value = json.loads("\n".join(lines))
    except (ValueError, RecursionError) as error:
        if _is_json(next(filter(str.strip, lines), "null")):
            return None
        raise PromptError(
            f"{file} is not JSON ({error}): give an array of records, or one {form} per line, or "
            "name it .txt if it is a text."
        ) from error
    if not isinstance(value, list):
        return [Record(value, 1, str(file))]
    return [Record(each, at, f"{file}, entry {at}") for at, each in enumerate(value, 1)]


def _of_line(line: str, number: int, where: str, form: str) -> Record:
    try:
        return Record(json.loads(line), number, where)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON ({error}): give one {form} per line.") from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
