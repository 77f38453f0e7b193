"""Text files, which all are UTF-8, with a byte order mark or without."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path

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
