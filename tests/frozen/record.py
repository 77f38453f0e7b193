"""Records the fixture, or a part of it, from the tree of today, on purpose.

    python -m tests.frozen.record                                  # all of it: minutes
    python -m tests.frozen.record --what help openapi              # these parts
    python -m tests.frozen.record --what texts --only 'llama/auto/*'
    python -m tests.frozen.record --what texts --check             # compare, write nothing

Parts: commands, help, methods, openapi, describe, names, texts (with the counts of drafted tokens),
and heads (small trained heads that texts are drafted with; who renews them renews the texts too).
It prints what has become different. Which cases --only means is said by their names:
model/method/rule/tokens, with * and ?.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers.utils import logging as quiet

from . import heads
from .differences import text_differences
from .files import read, write
from .parts import (
    COUNTS,
    SURFACES,
    TEXTS,
    case_differences,
    expected,
    recorded_cases,
    shortened,
    surface_differences,
)
from .texts import all_cases, played

HEADS = "heads"
PARTS = (*SURFACES, TEXTS, HEADS)
USUAL = tuple(part for part in PARTS if part != HEADS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Records or compares, as the command line says; returns 1 where a comparison found something
    different."""
    asked = _parser().parse_args(arguments)
    if not asked.check and HEADS in asked.what:
        heads.record()
    found = 0
    for part in asked.what:
        for line in _played(part, asked.only, asked.check):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            found += 1
    return int(asked.check and found > 0)


def _parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests.frozen.record", None, __doc__, formatter_class=text)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=USUAL, metavar="PART")
    parser.add_argument("--only", default="*", metavar="CASES", help="of the texts")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    return parser


def _played(part: str, only: str, check: bool) -> Iterator[str]:
    if part == TEXTS:
        yield from _checked_texts(only) if check else _recorded_texts(only)
    elif part in SURFACES:
        now = SURFACES[part]()
        yield from (f"{part}: {line}" for line in surface_differences(part, now))
        if not check:
            write(part, now)


def _checked_texts(only: str) -> Iterator[str]:
    for name in recorded_cases():
        if fnmatchcase(name, only):
            yield from (f"{name}: {line}" for line in case_differences(name))


def _recorded_texts(only: str) -> Iterator[str]:
    """Plays cases and writes what they are; those that there are no longer are dropped."""
    texts, counts = read(TEXTS) or {}, read(COUNTS) or {}
    old = {name: expected(name, texts) for name in texts}
    names = [case.name for case in all_cases()]
    whole: dict[str, Any] = {name: old[name] for name in names if name in old}
    for case in all_cases():
        if not fnmatchcase(case.name, only):
            continue
        now = played(case)
        whole[case.name] = now.get("texts", now)
        counts[case.name] = now.get("counts", {})
        before = old.get(case.name)
        news = ["is new"] if before is None else text_differences(before, whole[case.name])
        yield from (f"{case.name}: {line}" for line in news)
    there = [name for name in names if name in whole]
    write(TEXTS, {name: shortened(name, whole) for name in there})
    write(COUNTS, {name: counts[name] for name in there if counts.get(name)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet.disable_progress_bar()
    sys.exit(main())
