"""A real browser, for tests of pages. They are skipped, and say so, where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHONE, DESK = {"width": 390, "height": 760}, {"width": 1280, "height": 800}


@contextmanager
def started() -> Iterator[Any]:
    """Yields Playwright's browser."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(executable_path=found, args=list(FLAGS))
        yield made
        made.close()
