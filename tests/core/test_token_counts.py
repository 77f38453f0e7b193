"""Counts of tokens in texts that grow, are cut, change rows or are other texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.core.logits.token_counts import TokenCounts
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams

VOCABULARY = 5
TEXTS = st.lists(st.integers(0, VOCABULARY + 1), max_size=6)


def counted(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[text.count(token) for token in range(VOCABULARY)] for text in texts]


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), st.lists(st.booleans(), max_size=8))
def test_texts_that_grow_are_counted_as_if_anew(
    pieces: list[tuple[list[int], list[int]]], other: list[bool]
) -> None:
    tally, texts = TokenCounts(2, VOCABULARY), [[1, 1], []]
    for (one, two), exchanged in zip(pieces, [*other, *[False] * 8], strict=False):
        texts[0] += one
        texts[1] = [*two] if exchanged else texts[1] + two
        assert tally(texts).tolist() == counted(texts)
        assert [listed(row) for row in tally.occurring.tolist()] == [*map(different, texts)]


def different(text: Sequence[int]) -> list[int]:
    """The tokens of the vocabulary in a text, in the order in which they first occur."""
    found = dict.fromkeys(token for token in text if token < VOCABULARY)
    return listed(list(found))


def listed(row: list[int]) -> list[int]:
    """What a row of `TokenCounts.occurring` names: zeros fill it up, which name nothing new."""
    end = len(row)
    while end and row[end - 1] == 0:
        end -= 1
    return row[:end]


def test_texts_that_are_cut_and_rows_that_change_places_are_counted_anew() -> None:
    tally = TokenCounts(2, VOCABULARY)
    one, two = [1, 2, 2], [3]
    assert tally([one, two]).tolist() == counted([one, two])
    assert tally([two, one]).tolist() == counted([two, one])
    del one[1:]
    assert tally([two, one]).tolist() == counted([two, one])
    one.append(4)
    assert tally([two, one]).tolist() == counted([two, one])


def test_only_what_is_new_is_read() -> None:
    class Watched(list[int]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            found = super().__getitem__(index)
            self.read += len(found) if isinstance(index, slice) else 1
            return found

    text, tally = Watched([1] * 1000), TokenCounts(1, VOCABULARY)
    tally([text])
    assert text.read >= 1000
    text.read = 0
    for _ in range(10):
        text.append(2)
        tally([text])
    assert text.read <= 50
    assert tally([text]).tolist() == [[0, 1000, 10, 0, 0]]


def test_a_maker_of_distributions_counts_on() -> None:
    options = RowOptions(
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.2).resolve(
            {}
        )
    )
    pipeline = LogitsPipeline([options] * 2, VOCABULARY)
    logits, outputs = torch.randn(2, 1, VOCABULARY), [[1], [2, 2]]
    for grown in ([], [3], [3, 1], [0]):
        outputs[0] += grown
        history = History([[4], [0]], outputs)
        fresh = LogitsPipeline([options] * 2, VOCABULARY)
        assert pipeline(logits, Branches.root(2), history).equal(
            fresh(logits, Branches.root(2), history)
        )
