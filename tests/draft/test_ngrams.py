"""The n-grams of a text, by their first token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.draft.ngrams import NgramPool


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(2, 4), st.integers(1, 3), st.data())
def test_a_pool_holds_the_latest_different_ngrams(
    text: list[int], size: int, most: int, data: st.DataObject
) -> None:
    pool, cut = NgramPool(size, most), data.draw(st.integers(0, len(text)))
    pool.learn(text[:cut])
    pool.learn(text[cut:])
    ngrams = [tuple(text[begin : begin + size]) for begin in range(len(text) - size + 1)]
    latest = list(dict.fromkeys(reversed(ngrams)))
    for token in range(4):
        expected = [ngram[1:] for ngram in latest if ngram[0] == token][:most]
        assert list(pool.after(token)) == expected
    assert pool.known == len(text)
