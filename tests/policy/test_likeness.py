"""Which earlier texts a text is like, and what follows from that."""

from __future__ import annotations

import gc

import pytest

from outpace.engine.request import Request
from outpace.policy.ends import Ends
from outpace.policy.likeness import BINS, ENDS, KEPT, Likeness

from .test_controller import request


def asking(prompt: list[int]) -> Request:
    row = request()
    row.prompt_ids = prompt
    return row


def shares(likeness: Likeness, row: Request) -> list[float]:
    return [each.share for each in likeness.alike(row)]


def test_prompts_are_alike_by_the_tokens_that_few_of_them_have() -> None:
    template, likeness = [1, 2, 3, 4], Likeness()
    translations = [asking([*template, 10, 11, 100 + n]) for n in range(3)]
    questions = [asking([*template, 20, 21, 200 + n]) for n in range(3)]
    texts = {row: likeness.text(row) for row in (*translations, *questions)}
    new = asking([*template, 10, 11, 300])
    found = {each.text: each.share for each in likeness.alike(new)}
    assert min(found[texts[row]] for row in translations) > 0.8
    assert max(found[texts[row]] for row in questions) < 0.3


def test_the_first_text_is_like_none_and_the_same_prompt_is_the_same() -> None:
    likeness = Likeness()
    first, again, other = asking([5, 6]), asking([6, 5, 5]), asking([7])
    assert shares(likeness, first) == []
    assert shares(likeness, again) == pytest.approx([1.0])
    assert shares(likeness, other) == []
    assert shares(likeness, first) == [], "a text is compared when it comes"


@pytest.mark.parametrize("prompt", [[], [3]])
def test_prompts_of_next_to_nothing_can_be_compared(prompt: list[int]) -> None:
    likeness = Likeness()
    for _ in range(3):
        assert all(0 <= share <= 1 + 1e-9 for share in shares(likeness, asking(prompt)))


def test_of_a_long_prompt_both_ends_count() -> None:
    likeness = Likeness()
    first = asking([1] * ENDS + list(range(10, 10 + BINS)) + [2] * ENDS)
    likeness.text(first)
    (share,) = shares(likeness, asking([1, 2]))
    assert share == pytest.approx(1.0)


def test_only_the_latest_texts_are_kept() -> None:
    likeness, ends = Likeness(), Ends()
    for number in range(KEPT + 5):
        row = asking([1, 2, number + 10])
        ends.add(likeness.text(row), tokens=20, early=True)
    del row
    gc.collect()
    assert len(ends._of) == KEPT
    assert len(shares(likeness, asking([1, 2]))) == KEPT


def test_a_text_is_expected_to_end_like_those_of_its_kind() -> None:
    likeness, ends = Likeness(), Ends()
    for number in range(20):
        short, long = asking([1, 2, 100 + number]), asking([3, 4, 200 + number])
        ends.add(likeness.text(short), tokens=20, early=True)
        ends.add(likeness.text(long), tokens=400, early=True)
    of_short, of_long = (likeness.alike(asking(prompt)) for prompt in ([1, 2], [3, 4]))
    assert ends.expected(of_short, remaining=1000) < 30
    assert ends.expected(of_long, remaining=1000) > 250
    assert ends.expected(of_short, remaining=10) < 10
    assert 40 < ends.expected(of_short, remaining=1000, so_far=600) < 100


def test_texts_that_had_to_end_say_nothing_of_an_end() -> None:
    likeness, ends = Likeness(), Ends()
    for _ in range(20):
        ends.add(likeness.text(asking([1, 2])), tokens=100, early=False)
    assert ends.expected(likeness.alike(asking([1, 2])), remaining=50) > 45
