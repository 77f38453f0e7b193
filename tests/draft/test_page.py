"""docs/methods/lookup.md: every method has a line, a section and a table of its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "methods" / "lookup.md").read_text()
SECTIONS = dict(re.findall(r"\n## (\w+)\n(.*?)(?=\n## |\Z)", PAGE, re.DOTALL))
METHODS = ["ngram", "suffix", "consensus", "recycling", "retrieval", "lookahead"]


@pytest.mark.parametrize("method", METHODS)
def test_a_table_lists_the_options(method: str) -> None:
    assert f"<!-- options of method {method} -->" in SECTIONS[method]


def test_every_method_has_a_line_and_a_section() -> None:
    listed = re.findall(r'^\| `"(\w+)"`', PAGE, re.MULTILINE)
    assert listed == [name for name in SECTIONS if name in METHODS] == METHODS
