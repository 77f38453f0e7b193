"""The bar of `outpace train`: no estimate beyond the time that the run has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outpace.cli.progress import TimeLeft


@pytest.mark.parametrize(
    ("estimate", "end", "shown"),
    [
        (51 * 60.0, 1000.0 + 120, "0:02:00"),  # --minutes 2, and many steps
        (30.2, 1000.0 + 120, "0:00:31"),  # the last step comes first
        (51 * 60.0, None, "0:51:00"),
        (None, 1000.0 + 120, "0:02:00"),  # before the first step
        (51 * 60.0, 990.0, "0:00:00"),  # the last step takes longer than the time that was left
        (None, None, "-:--:--"),
    ],
)
def test_the_time_left_is_what_comes_first(
    estimate: float | None, end: float | None, shown: str
) -> None:
    task: Any = SimpleNamespace(time_remaining=estimate)
    assert str(TimeLeft(end, clock=lambda: 1000.0).render(task)) == shown
