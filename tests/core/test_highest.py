"""The highest score and its place are torch's own, for wide vocabularies too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outpace.core.logits.highest import MANY, PART, highest


def check(scores: Tensor) -> None:
    values, places = highest(scores)
    expected = scores.max(-1)
    assert torch.equal(values.nan_to_num(7.0), expected.values.nan_to_num(7.0))
    assert torch.equal(values.isnan(), expected.values.isnan())
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, MANY - 1, MANY, MANY + 1, MANY + PART - 1])
def test_all_widths(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    check(torch.randn(2, 3, count, generator=generator).to(dtype))


def test_the_first_of_equal_scores() -> None:
    scores = torch.zeros(1, 4, MANY + 9)
    scores[0, 1, [PART - 1, PART, MANY]] = 1.0
    scores[0, 2, [MANY + 2, MANY + 8]] = 1.0
    scores[0, 3] = float("-inf")
    check(scores)
    assert highest(scores)[1].tolist() == [[0, PART - 1, MANY + 2, 0]]


@pytest.mark.parametrize("place", [0, PART, MANY + 4])
def test_not_a_number(place: int) -> None:
    scores = torch.zeros(2, 1, MANY + 9)
    scores[1, 0, place] = float("nan")
    scores[:, 0, 3 * PART] = float("inf")
    check(scores)


def test_no_rows() -> None:
    check(torch.zeros(0, 3, MANY))
