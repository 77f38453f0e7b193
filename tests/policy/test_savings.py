"""What a draft model saves in a text, by earlier ones."""

from __future__ import annotations

import pytest
import torch

from outpace.policy.likeness import Alike, Text
from outpace.policy.savings import NEAREST, Savings


def text() -> Text:
    return Text(torch.zeros(1))


def known(savings: Savings, saved: float) -> Text:
    """Returns an earlier text of 100 tokens, of which each saved n plain rounds."""
    earlier = text()
    savings.note(earlier, 100, 100 * saved)
    return earlier


def test_many_texts_that_are_a_little_alike_do_not_outvote_those_of_its_kind() -> None:
    savings = Savings()
    other = [Alike(known(savings, 0.3), share=0.2) for _ in range(50)]
    kind = [Alike(known(savings, 0.0), share=0.6) for _ in range(NEAREST)]
    assert savings.of(text(), kind + other) == savings.of(text(), other + kind) < 0.01


def test_of_texts_that_are_as_much_alike_the_latest_count() -> None:
    savings = Savings()
    earlier = [Alike(known(savings, 0.3), share=0.5) for _ in range(50)]
    latest = [Alike(known(savings, 0.0), share=0.5) for _ in range(NEAREST)]
    assert savings.of(text(), earlier + latest) < 0.01


def test_texts_of_which_nothing_is_known_take_the_place_of_none() -> None:
    savings = Savings()
    kind = [Alike(known(savings, 0.3), share=0.2) for _ in range(NEAREST)]
    unknown = [Alike(text(), share=0.9) for _ in range(NEAREST)]
    assert savings.of(text(), kind + unknown) == pytest.approx(0.3)
