"""What CTC frames spell."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.methods.heads.ctc import Frame, beginnings, frames_of, prefix_beam_search

BLANK = 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=3))
def test_the_sum_over_all_frames_is_taken(weights: list[list[int]]) -> None:
    """Beam search that loses no beam, against all frames one by one."""
    probs = [[each / sum(row) for each in row] for row in weights]
    found = prefix_beam_search(
        [
            Frame(distribution[BLANK], list(enumerate(distribution[:BLANK])))
            for distribution in probs
        ]
    )
    expected: dict[tuple[int, ...], float] = {}
    for frames in itertools.product(range(3), repeat=len(probs)):
        chance = 1.0
        for distribution, frame in zip(probs, frames, strict=True):
            chance *= distribution[frame]
        text = tuple(frame for frame, _ in itertools.groupby(frames) if frame != BLANK)
        expected[text] = expected.get(text, 0.0) + chance
    assert found == pytest.approx(expected)


def test_the_likeliest_beginnings_come_with_their_own_beginnings() -> None:
    texts = {(5, 7): 0.4, (5, 8): 0.2, (6,): 0.3, (): 0.1}
    assert list(beginnings(texts, 3)) == [(5,), (5, 7), (6,)]
    assert beginnings(texts, 3) == pytest.approx({(5,): 0.6, (5, 7): 0.4, (6,): 0.3})
    assert beginnings({(): 1.0}, 3) == {}


def test_frames_have_the_likeliest_of_the_heads_own_tokens() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, 0.0]]])
    [[frame]] = frames_of(logits, torch.tensor([10, 11, 12]), 2)
    chances = logits[0, 0].double().softmax(-1).tolist()
    assert frame.blank == pytest.approx(chances[3])
    assert frame.tokens == [(11, pytest.approx(chances[1])), (12, pytest.approx(chances[2]))]


def test_few_frames_cannot_spell_many_tokens() -> None:
    from outpace.heads.base import TargetShape
    from outpace.methods.heads.ctc import Ctc, CtcConfig

    with pytest.raises(ValueError, match="3 frames do not spell 4 tokens"):
        Ctc(TargetShape(8, 20, 2), CtcConfig(depths=4, frames=3))
