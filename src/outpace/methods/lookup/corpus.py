"""Texts, chats and a target's answers from files, as the tokens that a datastore is built of."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.core.unicode import check_unicode
from outpace.core.values import is_integer
from outpace.errors import ConfigError, PromptError
from outpace.files import Record, decoded, holds_records, pieces, question, records
from outpace.inputs.documents import (
    ANSWERS,
    FIELDS,
    QUESTIONS,
    TEXTS,
    conversation,
    named_text,
    naming,
    plain_chat,
)
from outpace.targets.hf.tokenizer import tokenized
from outpace.train.answers import FILE

BLOCK = 1 << 20
"""Bytes of a text file that are read at once, to the end of their line."""

COMPRESSED = ".xz"
"""The ending of files as lab/answers has them."""

Advance = Callable[[int], None]
"""Called with the number of bytes that were read."""


def tokenised(
    files: Sequence[Path], tokenizer: Any, advance: Advance | None = None
) -> Iterator[list[int]]:
    """Yields the token ids of every text and chat of some files.

    A record of a JSON file (`outpace.files`) is a text, a chat, or a prompt with its answer. Of
    any other file all is text. Chats are written as the tokenizer's chat template does, if there is
    one. Raises ``ConfigError`` for a file that cannot be read, and for a record without any of
    these.
    """
    for file in files:
        read = _records if holds_records(file) else _blocks
        for text in read(file, tokenizer, advance or (lambda count: None)):
            yield tokenized(tokenizer, text, add_special_tokens=False)


def answer_files(paths: Sequence[Path]) -> list[Path]:
    """Returns these files, and the files of answers in the folders among them.

    Raises ``ConfigError`` where there is none.
    """
    found = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = [each for each in sorted(path.iterdir()) if _may_hold_answers(each)]
        found += files
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(
                f"{str(path)!r} holds no answers: name a folder or a file that `outpace train "
                "--self-distill` has written (answers.jsonl), or one of lab/answers (*.xz)."
            )
    return found


def _may_hold_answers(file: Path) -> bool:
    return file.name == FILE or file.suffix == COMPRESSED


def answers(
    files: Sequence[Path], vocabulary: int, advance: Advance | None = None
) -> Iterator[list[int]]:
    """Yields the answers in some files, which a target wrote as token ids below ``vocabulary``.

    A line holds the tokens of a prompt and of its answer, as ``outpace train --self-distill``
    writes them, or a number, a temperature and the answer, as lab/answers does. Raises
    ``ConfigError`` for any other line, but for a first one that tells about the others.
    """
    for file in files:
        read = _unpacked if file.suffix == COMPRESSED else _lines
        try:
            for record in records(read(file, advance or (lambda count: None)), file):
                if not (isinstance(record.value, Mapping) and record.number == 1):
                    yield _answer(record, vocabulary)
        except PromptError as error:
            raise ConfigError(str(error)) from error


def _unpacked(file: Path, advance: Advance) -> Iterator[str]:
    try:
        data = file.read_bytes()
        lines = decoded(lzma.decompress(data), str(file), error=ConfigError).splitlines()
    except (OSError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise ConfigError(f"cannot read {str(file)!r}: {reason}.") from error
    advance(len(data))
    yield from lines


def _answer(record: Record, vocabulary: int) -> list[int]:
    found = record.value[-1] if isinstance(record.value, list) and record.value else None
    if not isinstance(found, list) or not all(map(is_integer, found)):
        raise ConfigError(
            f"{record.where} holds no answer as token ids: give [[prompt], [answer]] per line."
        )
    if not all(0 <= token < vocabulary for token in found):
        raise ConfigError(
            f"{record.where} has tokens that the tokenizer does not know: name the model that "
            "wrote it with --model."
        )
    return found


def _blocks(file: Path, tokenizer: Any, advance: Advance) -> Iterator[str]:
    for block in pieces(file, BLOCK, error=ConfigError):
        advance(len(block.encode()))
        yield block


def _records(file: Path, tokenizer: Any, advance: Advance) -> Iterator[str]:
    try:
        for record in records(_lines(file, advance), file):
            with naming(record.where):
                text = _text(record.value, tokenizer)
                check_unicode("the text", text)
            yield text
    except PromptError as error:
        raise ConfigError(str(error)) from error


def _lines(file: Path, advance: Advance) -> Iterator[str]:
    for line in pieces(file, 0, error=ConfigError):
        advance(len(line.encode()))
        yield line.removesuffix("\n")


def _text(value: Any, tokenizer: Any) -> str:
    """The text of a record; a chat without a template, or one that it refuses, as its turns."""
    if isinstance(value, str) and value:
        return value
    record = value if isinstance(value, Mapping) else {}
    messages = conversation(record)
    if messages is None:
        name = named_text(record, (*TEXTS, *QUESTIONS, *ANSWERS))
        if name is None or not record[name]:
            raise PromptError(f"this holds no text, and needs {FIELDS}.")
        return question(record, name) if name in QUESTIONS else str(record[name])
    if getattr(tokenizer, "chat_template", None):
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is a program of the model's, and raises what it likes
            pass
    return plain_chat(messages)
