"""The drafter that CONTRIBUTING shows really works."""

import re
from pathlib import Path

import torch

from outpace.core.law import History, LawMaker, RowOptions
from outpace.core.params import SamplingParams
from outpace.draft.base import Drafter, Rows

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def example() -> type[Drafter]:
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert source is not None
    scope: dict[str, object] = {"__name__": "example"}
    exec(source[1], scope)
    drafter = scope["RepeatDrafter"]
    assert isinstance(drafter, type)
    assert issubclass(drafter, Drafter)
    return drafter


def test_the_example_drafter_repeats_the_last_token() -> None:
    options = [RowOptions(SamplingParams(temperature=0).resolve({}))] * 2
    rows = Rows(
        History([[1, 2], [3]], [[], [4]]),
        LawMaker(options, vocabulary=8),
        seeds=torch.zeros(2, dtype=torch.long),
    )
    proposal = example()().propose(rows, [3, 1])
    assert proposal.tokens.tolist() == [[2, 2, 2], [4, 0, 0]]
    assert proposal.counts.tolist() == [3, 1]
