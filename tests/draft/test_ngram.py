"""Prompt look-up: the sizes that may be given."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.errors import ConfigError
from outpace.methods.lookup.ngram import NgramDrafter


@pytest.mark.parametrize(
    ("given", "sizes"),
    [({}, (2, 4)), ({"min": 3}, (3, 4)), ({"min": 6}, (6, 6)), ({"max": 3}, (2, 3)),
     ({"max": 1}, (1, 1)), ({"min": 1, "max": 9}, (1, 9))],
)  # fmt: skip
def test_one_size_may_be_given_alone(given: dict[str, int], sizes: tuple[int, int]) -> None:
    options = NgramDrafter.configure({f"prompt_lookup_{end}": n for end, n in given.items()})
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == sizes


@pytest.mark.parametrize(
    "given", [{"min": 3, "max": 2}, {"min": 0}, {"max": 0}, {"max": 65}, {"min": "2"}]
)
def test_sizes_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"prompt_lookup_m(in|ax)"):
        NgramDrafter.configure({f"prompt_lookup_{end}": n for end, n in given.items()})
