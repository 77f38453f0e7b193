"""The tables of options in the documentation are what the code says, and leave nothing out."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import option_tables
from outpace import LLM, SamplingParams
from outpace.config import COMMON
from outpace.core.options import described, options_of
from outpace.draft.registry import drafter_names, find_drafter
from outpace.policy.lengths.registry import find_length, length_names
from outpace.verify.registry import rules

PAGE = option_tables.DOCS / "options.md"


def test_the_tables_are_what_the_code_says() -> None:
    pages = [str(page) for page, _ in option_tables.outdated()]
    assert not pages, f"renew {pages} with: python -m tests.option_tables"


def listed(part: str) -> list[str]:
    """The options in a part's tables."""
    section = PAGE.read_text().split(f"\n## {part}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_every_option_is_listed_once() -> None:
    assert listed("LLM") == list(inspect.signature(LLM).parameters)
    assert sorted(listed("SamplingParams")) == sorted(
        one.name for one in options_of(SamplingParams)
    )
    assert sorted(listed("speculative_config")) == sorted(COMMON)


KINDS = {
    **{f"method {name}": find_drafter(name).Options for name in drafter_names()},
    **{f"length {name}": find_length(name).Options for name in length_names()},
    **{f"verify {name}": kind for name, kind in rules().items()},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_option_says_what_it_does(kind: type) -> None:
    assert [one.name for one in described(kind) if not one.help] == []


def test_a_page_that_is_out_of_date_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text("<!-- options of verify lenient -->\n<!-- end -->\n")
    monkeypatch.setattr(option_tables, "DOCS", tmp_path)
    ((_, renewed),) = option_tables.outdated()
    assert (
        "| `lenience` | `0.8` | What q is multiplied by; 1 is lossless. (above 0, up to 1) |"
        in renewed
    )
