"""Numbers in options are checked alike: numpy's are taken, what is no finite number is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from outpace.core.options import make_options
from outpace.core.trees.tree_shape import TreeShape
from outpace.core.values import number
from outpace.draft.branching import shape_of
from outpace.errors import ConfigError
from outpace.methods.choosers.learned.hedge import HedgeOptions
from outpace.methods.choosers.learned.ucb import UcbOptions
from outpace.methods.choosers.task import TaskOptions
from outpace.methods.heads.s2d import S2dOptions
from outpace.methods.lookup.suffix import SuffixOptions
from outpace.methods.online.options import OnlineOptions, online_options
from outpace.policy.lengths.registry import length_options
from outpace.verify.registry import make_rule

DRAFTERS = {"drafters": [{"method": "ngram"}, {"method": "suffix"}]}
TASK = {"routes": {"code": {"method": "ngram"}}, "router": lambda prompt: ("code", 1.0)}
WRONG = [
    True,
    np.bool_(True),
    math.inf,
    -math.inf,
    math.nan,
    np.float32("nan"),
    "0.1",
    [0.1],
    10**400,
]


def online(**given: Any) -> OnlineOptions | None:
    return online_options("online", given)


PLACES = [
    ("exploration", lambda **given: make_options(UcbOptions, {**DRAFTERS, **given}, "unknown {}")),
    ("memory", lambda **given: make_options(HedgeOptions, {**DRAFTERS, **given}, "unknown {}")),
    ("asking", lambda **given: make_options(HedgeOptions, {**DRAFTERS, **given}, "unknown {}")),
    ("threshold", lambda **given: make_options(TaskOptions, {**TASK, **given}, "unknown {}")),
    (
        "confidence",
        lambda **given: make_options(S2dOptions, {"model": "a/folder", **given}, "unknown {}"),
    ),
    (
        "suffix_decoding_min_token_prob",
        lambda **given: make_options(SuffixOptions, given, "unknown {}"),
    ),
    ("share", online),
    ("threshold", lambda **given: length_options("risk", given)),
    ("lenience", lambda **given: make_rule("lenient", **given)),
]


@pytest.mark.parametrize(("name", "make"), PLACES)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
def test_what_is_no_finite_number_is_refused(name: str, make: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.* must be a number in [\[(]0, .*, not "):
        make(**{name: value})


@pytest.mark.parametrize(("name", "make"), PLACES)
def test_numbers_of_numpy_become_pythons(name: str, make: Any) -> None:
    options = make(**{name: np.float32(0.5)})
    assert getattr(options, name) == 0.5
    assert type(getattr(options, name)) is float


def test_bounds_are_said_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"a must be a number in \(0, 1\), not 1"):
        number("a", 1, 0, 1, closed=False, below=True, error=ConfigError)
    with pytest.raises(ConfigError, match=r"a must be a number in \[0, inf\), not -1"):
        number("a", -1, 0, math.inf, closed=True, error=ConfigError)
    with pytest.raises(ConfigError, match="a must be a finite number, not inf"):
        number("a", math.inf, -math.inf, math.inf, closed=True, error=ConfigError)


def test_the_children_of_a_tree_are_whole_numbers() -> None:
    shape = shape_of([np.int64(3), 2])
    assert isinstance(shape, TreeShape)
    assert shape == shape_of([3, 2])
    for wrong in ([True, 2], [2.0], [0], [np.bool_(True)]):
        with pytest.raises(ConfigError, match="branching must"):
            shape_of(wrong)
