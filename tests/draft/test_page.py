"""docs/methods/lookup.md: its tables have every option with its default, and its links hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outpace.core.options import described
from outpace.draft.registry import find_drafter

PAGE = (Path(__file__).parents[2] / "docs" / "methods" / "lookup.md").read_text()
SECTIONS = dict(re.findall(r"\n## (\w+)\n(.*?)(?=\n## |\Z)", PAGE, re.DOTALL))
METHODS = ["ngram", "suffix", "consensus", "recycling", "retrieval", "lookahead"]


@pytest.mark.parametrize("method", METHODS)
def test_the_table_of_options_is_right(method: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", SECTIONS[method], re.MULTILINE)
    options = described(find_drafter(method).Options)
    shown = [(one.name, repr(one.default).replace("'", '"')) for one in options]
    assert rows == shown


def test_every_method_has_a_line_and_a_section() -> None:
    listed = re.findall(r'^\| `"(\w+)"`', PAGE, re.MULTILINE)
    assert listed == [name for name in SECTIONS if name in METHODS] == METHODS
