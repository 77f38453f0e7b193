"""The page of all arguments and options is complete, and its defaults are the code's."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from outpace import LLM, SamplingParams
from outpace.config import COMMON

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def rows(part: str) -> Iterator[tuple[str, str]]:
    """The names of a part's tables, each with the default of its row; "" where it has none."""
    section = PAGE.read_text().split(f"\n## {part}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            names = re.findall(r"`(\w+)`", cells[0])
            defaults = re.findall(r"`([^`]+)`", cells[1]) or [""]
            yield from zip(
                names, defaults * len(names) if len(defaults) == 1 else defaults, strict=True
            )


def documented(part: str) -> dict[str, Any]:
    return {name: ast.literal_eval(default) if default else None for name, default in rows(part)}


def test_arguments_of_llm() -> None:
    taken = inspect.signature(LLM.__init__).parameters
    assert documented("LLM") == {
        name: None if each.default is inspect.Parameter.empty else each.default
        for name, each in taken.items()
        if name != "self"
    }


def test_sampling_params() -> None:
    defaults = {each.name: each.default for each in fields(SamplingParams)}
    assert MISSING not in defaults.values()
    assert documented("SamplingParams") == defaults


def test_entries_of_the_speculative_config() -> None:
    assert {name for name, _ in rows("speculative_config")} == {*COMMON, "model"}
