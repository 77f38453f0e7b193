"""Which cases of a test `make test` runs, where there are many of one kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def representatives(cases: Iterable[Any], kept: Collection[Any] | Callable[..., bool]) -> list[Any]:
    """Returns the cases of a parametrized test: those that are kept, and the others as `slow`.

    Families, heads, drafters and defects are many, and most of them go through the same code. What
    differs in kind is tried at each change, by one or a few of each kind; all the others take
    minutes, and are tried by `make audit`.

    cases: values, or tuples where a test has several parameters. kept: some of the cases, or what
    tells for a case, given its values, whether it is one of them. There must be one.
    """
    given = list(cases)

    def keeps(case: Any) -> bool:
        if not callable(kept):
            return case in kept
        return kept(*case) if isinstance(case, tuple) else kept(case)

    keep = [keeps(case) for case in given]
    assert any(keep), "something of each test is run at each change"
    return [case if stays else _slow(case) for case, stays in zip(given, keep, strict=True)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
