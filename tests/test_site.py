"""Links between texts lead somewhere, and the site can be built of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lab.site_pages import COPIES, examples_as_code, with_links_to_pages

ROOT = Path(__file__).parents[1]
GLOBS = ("*.md", "docs/**/*.md", "lab/**/*.md", "bundle/README.md")
TEXTS = sorted(page for pattern in GLOBS for page in ROOT.glob(pattern))
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)|\b(?:src|srcset|href)=\"([^\"#:]+)\"")


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yields place and anchor of each link to a file of the repository."""
    for place, anchor, attribute in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if not place.startswith(("http:", "https:", "mailto:")):
            yield place or attribute, anchor


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in links(page):
        found = (page.parent / place).resolve() if place else page
        assert found.exists(), place
        assert not anchor or found.suffix != ".md" or anchor in anchors(found), f"{place}#{anchor}"


def test_links_are_found() -> None:
    found = {place for page in TEXTS for place, _ in links(page)}
    assert {"docs/methods/README.md", "docs/pictures/headline-dark.svg"} <= found


@pytest.mark.parametrize(
    ("uri", "written", "there"),
    [
        ("index.md", "[a](docs/audit.md#b)", "[a](audit.md#b)"),
        ("index.md", '<img src="docs/pictures/trees.png">', '<img src="pictures/trees.png">'),
        ("rules/adding.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("rules/adding.md", "[a\nb](../../lab/log.md)", "a\nb (`lab/log.md`)"),
        ("rules/adding.md", "[a](lossy.md)", "[a](lossy.md)"),
        ("index.md", "[a](https://b.c/docs/audit.md)", "[a](https://b.c/docs/audit.md)"),
        ("index.md", "x[0](y)", "x[0](y)"),
    ],
)
def test_links_between_files_become_links_between_pages(uri: str, written: str, there: str) -> None:
    assert with_links_to_pages(written, uri) == there


def test_other_files_are_linked_to_the_repository_where_it_is_known() -> None:
    found = with_links_to_pages("[a](../lab/log.md#b)", "audit.md", "https://c.d/outpace")
    assert found == "[a](https://c.d/outpace/blob/main/lab/log.md#b)"


def test_examples_of_docstrings_are_shown_as_code() -> None:
    found = examples_as_code("One.\n\n>>> one()  # doctest: +SKIP\n1\n\nTwo.\n\n>>> two()")
    assert found == "One.\n\n```pycon\n>>> one()\n1\n```\n\nTwo.\n\n```pycon\n>>> two()\n```"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strictly: no link or anchor leads nowhere, each page is in the navigation. What a page needs
    comes with it, so that nothing is fetched from elsewhere."""
    for needed in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(needed, reason="needs: pip install -e '.[docs]'")
    build = [sys.executable, "-P", "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    pages = {page: page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert len(pages) > len(COPIES)
    fetched = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?https?://')
    assert [page.name for page, text in pages.items() if fetched.search(text)] == []
