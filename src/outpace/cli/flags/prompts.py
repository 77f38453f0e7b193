"""Prompts from the command line, a file, a pipe, or built in."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.core.unicode import check_unicode
from outpace.errors import PromptError
from outpace.files import PROMPT, Record, decoded, holds_records, no_prompt, read_text, records

BUILT_IN = "Once upon a time, there was a little girl named Lily."
STDIN = "-"


@dataclass(frozen=True)
class Entry:
    """One prompt, and the id that its record came with."""

    text: str
    id: Any = None


def read_prompts(prompt: str | None, file: Path | None) -> list[Entry]:
    """Returns the prompts: one, or as many as a JSON file has records.

    Raises ``PromptError`` for what is missing, empty or not text.
    """
    if prompt is not None and file is not None:
        raise PromptError("give the prompt either as an argument or with --prompt-file, not both.")
    if file is not None and str(file) != STDIN:
        return _from_file(file)
    if file is not None or prompt == STDIN or (prompt is None and has_piped_input()):
        source = "standard input"
        return [_whole(decoded(sys.stdin.buffer.read(), source), source)]
    if prompt is None:
        return [Entry(BUILT_IN)]
    return [_one(prompt, "the prompt")]


def has_piped_input() -> bool:
    """Tells whether standard input is a pipe or a file: neither a terminal nor /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _from_file(file: Path) -> list[Entry]:
    text = read_text(file, "prompt file")
    return _records(text, file) if holds_records(file) else [_whole(text, str(file))]


def _whole(text: str, source: str) -> Entry:
    # Editors and echo end a text with a line break, which is no part of what is to be continued.
    return _one(text.removesuffix("\n").removesuffix("\r"), source)


def _one(text: str, source: str) -> Entry:
    if not text:
        raise PromptError(f"{source} is empty: give some text to continue.")
    check_unicode(source, text)
    return Entry(text)


def _records(text: str, file: Path) -> list[Entry]:
    entries = [_entry(record) for record in records(text.split("\n"), file, PROMPT)]
    if not entries:
        raise no_prompt(file)
    return entries


def _entry(record: Record) -> Entry:
    found = record.value
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise PromptError(f'{record.where} has no "prompt" text: make each record {PROMPT}.')
    return Entry(_one(found["prompt"], f"the prompt of {record.where}").text, found.get("id"))
