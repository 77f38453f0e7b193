"""The table of n-grams: what it counts, how it backs off, its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outpace.methods.lookup.table as table_module
from outpace.methods.lookup.table import DEPTH, SUCCESSORS, NgramTable

TEXTS = st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=8)


def table(texts: list[list[int]], **more: Any) -> NgramTable:
    return NgramTable.of(np.array([token for text in texts for token in [*text, -1]], int), **more)


def plainly(texts: list[list[int]], context: tuple[int, ...]) -> dict[int, float]:
    """Returns the chances after a context by the formula; nothing where one text has it at most."""
    followed: dict[int, set[int]] = {}
    for number, text in enumerate(texts):
        for end in range(len(context), len(text)):
            if tuple(text[end - len(context) : end]) == context:
                followed.setdefault(text[end], set()).add(number)
    if len(set().union(*followed.values())) < 2:
        return plainly(texts, context[1:]) if len(context) > 1 else {}
    total = sum(map(len, followed.values()))
    lower = plainly(texts, context[1:]) if len(context) > 1 else {}
    return {
        token: (max(0.0, len(those) - 0.75) + 0.75 * len(followed) * lower.get(token, 0.0)) / total
        for token, those in followed.items()
    }


@given(TEXTS, st.lists(st.integers(0, 5), max_size=6))
def test_chances_are_those_of_the_formula(texts: list[list[int]], context: list[int]) -> None:
    found, expected = table(texts).after(context), {}
    for size in range(min(DEPTH, len(context)), 0, -1):
        expected = expected or plainly(texts, tuple(context[-size:]))
    if not expected:
        assert found is None
        return
    assert found is not None
    token, chance = found
    assert expected[token] == pytest.approx(max(expected.values()), abs=1e-6)
    assert chance == pytest.approx(expected[token], abs=1 / 32)


def test_a_text_counts_once_however_often_it_repeats_itself() -> None:
    assert table([[1, 2] * 9]).after([1]) is None
    found = table([[1, 2] * 9, [1, 3], [1, 3]])
    assert found.after([1]) == (3, pytest.approx((2 - 0.75) / 3, abs=1 / 32))


def test_single_tokens_have_several_successors() -> None:
    texts = [[1, 5], [1, 5], [1, 5], [1, 4], [1, 4], [1, 3], [1, 2], [1, 0]]
    successors = table(texts).successors(6, 3)
    assert successors[1, :2].tolist() == [5, 4]
    assert successors[1, 2] in (0, 2, 3)
    assert (successors[[0, 2, 3, 4, 5]] == -1).all()
    again = NgramTable.of_successors(successors)
    assert again.successors(6, SUCCESSORS)[:, :3].tolist() == successors.tolist()
    assert again.after([9, 1]) == (5, pytest.approx(0.5, abs=1 / 32))


def test_it_is_bounded_and_keeps_what_brings_most() -> None:
    often, seldom = [[1, 2, 3]] * 9, [[4, 5, 6]] * 2
    small = table([*seldom, *often], most=2)
    assert len(small) == 2
    assert small.after([1]) == (2, pytest.approx(8.25 / 9, abs=1 / 32))
    assert small.after([4]) is None


@given(TEXTS)
def test_a_file_gives_the_same_table(texts: list[list[int]]) -> None:
    made = table(texts)
    data = made.to_bytes()
    assert data == table(texts).to_bytes()
    again = NgramTable.from_bytes(data, len(made))
    assert again.to_bytes() == data
    for context in ([0], [1, 2], [5, 4, 3, 2, 1]):
        assert again.after(context) == made.after(context)


def test_other_files_are_refused() -> None:
    made = table([[1, 2, 3], [1, 2, 3], [2, 3, 4]])
    data = made.to_bytes()
    for bad, entries in (
        (data[:-3], len(made)),
        (data, len(made) + 1),
        (data, len(made) - 1),
        (b"none", len(made)),
        (b"", len(made)),
    ):
        with pytest.raises(ValueError, match=r"entries|incorrect|header"):
            NgramTable.from_bytes(bad, entries)


def test_of_two_tables_the_first_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = table([[1, 2], [1, 2]]), table([[1, 3], [1, 3], [4, 5], [4, 5]])
    both = first.with_more(second)
    assert [both.after([token]) for token in (1, 4)] == [first.after([1]), second.after([4])]
    monkeypatch.setattr(table_module, "ENTRIES", 1)
    assert len(first.with_more(second)) == 1
