"""What CTC frames spell."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.draft.trained.spelling import Frame, likeliest_tree, spelt
from outpace.heads.steps.ctc import collapsed

BLANK = 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=3))
def test_the_sum_over_all_frames_is_taken(weights: list[list[int]]) -> None:
    """Beam search that loses no beam, against all frames one by one."""
    laws = [[each / sum(row) for each in row] for row in weights]
    found = spelt([Frame(law[BLANK], list(enumerate(law[:BLANK]))) for law in laws])
    expected: dict[tuple[int, ...], float] = {}
    for frames in itertools.product(range(3), repeat=len(laws)):
        chance = 1.0
        for law, frame in zip(laws, frames, strict=True):
            chance *= law[frame]
        read = collapsed(torch.tensor(frames), BLANK, len(laws)).tolist()
        text = tuple(token for token in read if token >= 0)
        expected[text] = expected.get(text, 0.0) + chance
    assert found == pytest.approx(expected)


def test_the_tree_has_the_likeliest_beginnings() -> None:
    texts = {(5, 7): 0.4, (5, 8): 0.2, (6,): 0.3, (): 0.1}
    guess = likeliest_tree(texts, 3)
    assert (guess.tokens, guess.parents) == ([5, 7, 6], [0, 1, 0])
    assert guess.score == pytest.approx(0.6 + 0.4 + 0.3)
    assert likeliest_tree({(): 1.0}, 3).tokens == []


def test_few_frames_cannot_spell_many_tokens() -> None:
    from outpace.heads.base import TargetShape
    from outpace.heads.steps.ctc import Ctc, CtcConfig

    with pytest.raises(ValueError, match="3 frames do not spell 4 tokens"):
        Ctc(TargetShape(8, 20, 2), CtcConfig(depths=4, frames=3))
