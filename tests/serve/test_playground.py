"""The page, in a real browser. Skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from outpace import LLM

from .conftest import call, running

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(llm) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 1100, "height": 900})
    opened.complaints = []
    opened.on("console", lambda m: opened.complaints.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.asked = []
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.goto(address)
    opened.wait_for_selector("#about:not(:empty)")
    yield opened
    assert opened.complaints == []
    assert all(url.startswith((address, "data:")) for url in opened.asked)
    opened.close()


def texts(page: Any) -> list[str]:
    return [pane.text_content() for pane in page.query_selector_all(".text")]


def test_the_page_asks_nobody_else(address: str) -> None:
    for path in ("/", "/playground.js", "/playground.css"):
        status, _, headers = call(address, path)
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
    assert "http" not in call(address, "/")[1].replace("<!doctype html>", "")


def test_plain_and_speculative_side_by_side(page: Any) -> None:
    page.fill("#tokens", "40")
    page.fill("#temperature", "1")
    page.select_option("#speculative", "4")
    page.click("#run")
    page.wait_for_selector("#verdict:not(:empty)")
    assert "The same" in page.text_content("#verdict")
    fast, plain = texts(page)
    assert fast == plain
    assert len(fast) > 40
    assert page.query_selector_all(".pane:first-child .accepted")
    assert not page.query_selector_all(".pane:last-child .text .accepted")
    assert page.query_selector_all("#depths .depth")
    page.click(".pane:first-child .text .accepted")
    assert "drafted" in page.text_content("#round-words")
    assert len(page.query_selector_all("#tree rect.box")) >= 5
    page.hover(".pane:first-child .text .token")
    assert "%" in page.text_content("#tip")


def test_the_keyboard_is_enough(page: Any) -> None:
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#verdict:not(:empty)")
    page.focus(".text")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.is_visible("#tip")
    page.keyboard.press("Enter")
    assert page.is_visible("#tree svg")
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")


def test_a_chat_and_a_narrow_screen(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.check("[value=chat]")
    page.fill("#tokens", "20")
    page.uncheck("#beside")
    page.click("#run")
    page.wait_for_selector("#depths-box:not([hidden]), #tree-box:not([hidden])")
    assert len(texts(page)[0]) > 10
    boxes = [found.bounding_box() for found in page.query_selector_all("main, form, article, ul")]
    assert max(box["x"] + box["width"] for box in boxes) <= 360


def test_what_is_refused_is_told(page: Any) -> None:
    page.fill("#prompt", "word " * 600)
    page.click("#run")
    page.wait_for_selector("#message:not([hidden])")
    assert "shorten the prompt" in page.text_content("#message")
    page.complaints[:] = [text for text in page.complaints if "400" not in text]


def test_the_page_of_a_server_with_keys_introduces_itself_to_who_has_one(
    browser: Any, llm: LLM
) -> None:
    with running(llm, api_keys=("a-key",)) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#access[open]")
        assert "API key" in page.text_content("#about")
        page.fill("#key", "a-key")
        page.press("#key", "Tab")
        page.locator("#about", has_text="tiny").wait_for()
        page.fill("#tokens", "4")
        page.press("#tokens", "Control+Enter")
        page.wait_for_selector("#verdict:not(:empty)")
        page.close()
