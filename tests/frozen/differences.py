"""What is different from what was recorded, in lines that a person can read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

NEAR = 6
"""Tokens that are shown before the first one that differs, and after it."""


def differences(recorded: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yields what has changed between two values of JSON: where, what it was, what it is.

    Lists of lines are compared as texts are.
    """
    if recorded == now:
        return
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        for name in [*recorded, *(name for name in now if name not in recorded)]:
            inner = f"{where} > {name}" if where else name
            if name not in now:
                yield f"{inner}: is gone; it was {_short(recorded[name])}"
            elif name not in recorded:
                yield f"{inner}: is new: {_short(now[name])}"
            else:
                yield from differences(recorded[name], now[name], inner)
    elif _are_lines(recorded) and _are_lines(now):
        yield f"{where}:"
        for line in difflib.unified_diff(recorded, now, "recorded", "now", lineterm="", n=1):
            yield f"    {line}"
    else:
        yield f"{where}:\n    recorded: {_short(recorded)}\n    now:      {_short(now)}"


def text_differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields for each text of a case that has changed its first other token."""
    for batch in {**recorded, **now}:
        before, after = recorded.get(batch), now.get(batch)
        if not (isinstance(before, list) and isinstance(after, list) and len(before) == len(after)):
            yield from differences(before, after, batch)
            continue
        for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
            if old != new:
                yield from _text_difference(f"{batch}, text {number} of {len(before)}", old, new)


def _text_difference(where: str, old: str, new: str) -> Iterator[str]:
    before, after = old.split(), new.split()
    same = [a == b for a, b in zip(before, after, strict=False)]
    first = same.index(False) if False in same else len(same)
    yield f"{where}: the first {first} tokens are the same, then"
    for name, tokens in (("recorded", before), ("now", after)):
        shown = " ".join(tokens[max(0, first - NEAR) : first + NEAR])
        yield f"    {name + ':':<10}{'... ' if first > NEAR else ''}{shown}"


def _are_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _short(value: Any, most: int = 300) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
