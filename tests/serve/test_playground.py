"""The page, in a real browser. Skipped where there is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from browser import DESK, PHONE, started
from outpace import LLM
from outpace.serve.app import PAGE, PAGE_FILES

from .conftest import call, running

ENDED = "#run:not([hidden])"
"""What is there once nothing runs."""


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(llm) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


def opened(browser: Any, address: str, size: dict[str, int] = DESK) -> Any:
    page = browser.new_page(viewport=size)
    page.complaints, page.asked, page.bodies = [], [], []
    page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("request", lambda request: page.bodies.append(request.post_data_json))
    page.goto(address)
    page.wait_for_selector("#about:not(:empty)")
    return page


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    found = opened(browser, address)
    yield found
    assert found.complaints == []
    assert all(url.startswith((address, "data:")) for url in found.asked)
    found.close()


def run(page: Any, question: str | None = None, **options: Any) -> None:
    """Sets options, asks, and waits for the end."""
    if options:
        page.locator("#options").evaluate("box => box.open = true")
    for name, value in options.items():
        if isinstance(value, bool):
            page.set_checked(f"#{name}", value)
        elif name == "speculative":
            page.select_option(f"#{name}", value)
        else:
            page.fill(f"#{name}", value)
    page.locator("#options").evaluate("box => box.open = false")
    if question is not None:
        page.fill("#prompt", question)
    page.click("#run")
    page.wait_for_selector(ENDED)


def texts(page: Any) -> list[str]:
    return [pane.text_content() for pane in page.query_selector_all(".text")]


def answering(page: Any, *answers: tuple[Sequence[dict[str, Any]], Any]) -> None:
    """Answers the page's requests in the place of a server. answers: the rounds of each text, and
    its account."""
    left = list(answers)

    def answer(route: Any) -> None:
        rounds, account = left.pop(0)
        text = "".join(
            token["text"] for one in rounds for token in one["tokens"] if not token["special"]
        )
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        told = {"rounds": rounds, "metrics": {"account": account}}
        event = {"choices": [choice], "outpace": told}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)


def token(text: str, origin: str = "plain", special: bool = False) -> dict[str, Any]:
    return {"id": len(text), "text": text, "origin": origin, "special": special}


def rounds(*words: str, seconds: float = 0.1, drafted: bool = False) -> list[dict[str, Any]]:
    """Rounds of one token each."""
    node = {"id": 1, "text": "x", "special": False, "parent": 0}
    nodes = [node] if drafted else []
    return [
        {"nodes": nodes, "path": [], "tokens": [token(word)], "seconds": seconds} for word in words
    ]


def test_the_page_asks_nobody_else(address: str) -> None:
    for path in PAGE_FILES:
        status, _, headers = call(address, path)
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
    assert set(PAGE_FILES.values()) == {file.name for file in PAGE.iterdir()}
    assert "http" not in call(address, "/")[1].replace("<!doctype html>", "")


def test_plain_and_speculative_side_by_side(page: Any) -> None:
    run(page, "Tell me a long story.", tokens="40", temperature="1", speculative="4")
    assert "The same" in page.text_content(".verdict")
    fast, plain = texts(page)
    assert fast == plain
    assert len(fast) > 40
    assert page.query_selector_all(".pane:first-child .accepted")
    assert not page.query_selector_all(".pane:last-child .text .accepted")
    assert "draft model: " in page.text_content(".pane:first-child .why")
    assert page.query_selector_all("#depths .depth")
    page.click(".pane:first-child .text .accepted")
    assert "drafted" in page.text_content("#round-words")
    assert len(page.query_selector_all("#tree rect.box")) >= 5
    page.hover(".pane:first-child .text .token")
    assert "%" in page.text_content("#tip")


def test_the_keyboard_is_enough(page: Any) -> None:
    page.focus("#prompt")
    page.keyboard.type("Tell me about a cat.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".verdict")
    page.focus(".text")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.is_visible("#tip")
    page.keyboard.press("Enter")
    assert page.is_visible("#tree svg")
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")


def test_a_model_with_a_template_is_talked_with(page: Any) -> None:
    assert page.is_checked("[value=chat]")
    assert page.input_value("#prompt") == ""
    run(page, "Hello.", system="Be kind.", tokens="12", beside=False)
    run(page, "And then?")
    assert len(page.query_selector_all(".turn")) == 2
    first, second = (body["messages"] for body in page.bodies if body)
    assert first == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello."},
    ]
    roles = [message["role"] for message in second]
    assert roles == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == texts(page)[0]
    page.locator("#options").evaluate("box => box.open = true")
    page.click("#anew")
    assert not page.query_selector_all(".turn")
    run(page, "Hello.")
    assert len(page.bodies[-1]["messages"]) == 2


def test_what_was_begun_anew_knows_nothing_of_the_text_before(page: Any) -> None:
    page.locator("#options").evaluate("box => box.open = true")
    page.fill("#tokens", "400")
    page.set_checked("#beside", False)
    page.fill("#prompt", "Tell me about a cat.")
    page.click("#run")
    page.wait_for_selector(".text .token")
    page.click("#anew")
    assert not page.query_selector_all(".turn")
    run(page, "Hello.", tokens="4")
    assert [one["content"] for one in page.bodies[-1]["messages"]] == ["Hello."]
    assert len(page.query_selector_all(".turn")) == 1


def test_a_model_without_one_continues_a_text(
    browser: Any, address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    page = opened(browser, address)
    assert page.is_checked("[value=prompt]")
    assert page.input_value("#prompt")
    run(page, tokens="8", beside=False)
    run(page)
    assert len(page.query_selector_all(".turn")) == 1, "each text begins anew"
    assert "messages" not in page.bodies[-1]
    assert page.complaints == []
    page.close()


def test_its_description_waits_for_the_tokenizer_alone(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While that reads a long prompt, everybody else is answered."""
    describe, begun = llm.describe, threading.Event()
    monkeypatch.setattr(llm, "describe", lambda: (begun.set(), describe())[1])
    with ThreadPoolExecutor() as pool:
        with llm.input_processor._shared.lock:
            asked = pool.submit(call, address, "/playground.json")
            assert begun.wait(20)
            healthy = pool.submit(call, address, "/health")
            assert healthy.result(20)[0] == 200
            assert not asked.done()
        assert asked.result(20)[0] == 200


def test_names_of_special_tokens_are_not_shown(page: Any, address: str) -> None:
    run(page, "Tell me about a cat.", tokens="200", beside=False)
    body = {"messages": [{"role": "user", "content": "Tell me about a cat."}]}
    options = {"max_tokens": 200, "temperature": 0, "seed": 1}
    answer = call(address, "/v1/chat/completions", {**body, **options})[1]["choices"][0]
    assert answer["finish_reason"] == "stop", "or there is no such token"
    assert texts(page) == [answer["message"]["content"]]
    page.fill("#round", page.get_attribute("#round", "max"))  # the round with the end
    page.click(".text .special")
    assert "end" in page.text_content("#round-words")
    for part in ("#talk", "#rounds"):  # the description of the model names its ends
        assert "<|" not in page.text_content(part)


def test_code_is_shown_in_the_font_of_code(page: Any) -> None:
    words = ("Use ", "`x`", " here:", "\n```", "py\n", "x = 1", "\n```", "\n", "Done.")
    answering(page, (rounds(*words), None))
    run(page, "?", beside=False)
    code = [span.text_content() for span in page.query_selector_all(".text .code")]
    assert code == ["`x`", "\n```", "py\n", "x = 1", "\n```", "\n"]
    font = "span => getComputedStyle(span).fontFamily"
    assert "monospace" in page.eval_on_selector(".text .code", font)
    assert "monospace" not in page.eval_on_selector(".text .token:not(.code)", font)


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_answer_is_seen_without_scrolling(browser: Any, address: str, size: Any) -> None:
    page = opened(browser, address, size)
    line = 1.5 * 16
    assert page.locator("#top").bounding_box()["height"] < 2.5 * line
    answering(page, *[(rounds(*["word "] * 400), None)] * 4)
    for turn in range(2):  # the second one begins below a long first one
        run(page, "Tell me a long story.", beside=False)
        box = page.locator(".turn .text").nth(turn).bounding_box()
        top, form = page.locator("#top").bounding_box(), page.locator("#form").bounding_box()
        assert top["y"] + top["height"] <= box["y"], "its beginning is below the header"
        assert box["y"] < form["y"] - 5 * line, "and far above the form"
    assert form["y"] + form["height"] <= size["height"] + 1
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(wide), "nothing leaves the page at its side"
    page.close()


FAST = rounds(*["a"] * 20, seconds=0.05, drafted=True)
NOISY = [{**one, "seconds": 0.05 if at < 10 else 0.2} for at, one in enumerate(FAST)]


@pytest.mark.parametrize(
    ("fast", "told"),
    [
        (FAST, "The same 20 tokens, 2.00 times as fast."),
        (rounds(*["a"] * 20, seconds=0.095, drafted=True), "differ by no more than noise"),
        (NOISY, "differ by no more than noise"),
        (FAST[:3], "differ by no more than noise"),
        (rounds(*["a"] * 20, seconds=0.05), "The same 20 tokens; nothing was drafted."),
    ],
    ids=["faster", "hardly", "noisy", "short", "undrafted"],
)
def test_no_speed_is_told_within_the_noise_or_without_drafts(
    page: Any, fast: list[dict[str, Any]], told: str
) -> None:
    account = {"sentence": "draft model: a token costs 0.40 of a pass, 55% accepted: no gain"}
    plain = rounds(*["a"] * len(fast), seconds=0.1)
    answering(page, (fast, account), (plain, {"sentence": "drafting was switched off"}))
    run(page, "?", beside=True)
    assert told in page.text_content(".verdict")
    assert ("times" in page.text_content(".verdict")) is ("2.00" in told)
    assert [why.text_content() for why in page.query_selector_all(".why")] == [
        account["sentence"],
        "",
    ]


def test_what_is_refused_is_told(page: Any) -> None:
    run(page, "word " * 600)
    page.wait_for_selector("#message:not([hidden])")
    assert "shorten the prompt" in page.text_content("#message")
    assert page.input_value("#prompt").startswith("word"), "to be shortened"
    assert not page.query_selector_all(".turn")
    page.complaints[:] = [text for text in page.complaints if "400" not in text]


def test_the_page_of_a_server_with_keys_introduces_itself_to_who_has_one(
    browser: Any, llm: LLM
) -> None:
    with running(llm, api_keys=("a-key",)) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#options[open]")
        assert "API key" in page.text_content("#about")
        page.fill("#key", "a-key")
        page.press("#key", "Tab")
        page.locator("#about", has_text="tiny").wait_for()
        run(page, "Hello.", tokens="4", beside=True)
        page.wait_for_selector(".verdict")
        page.close()
