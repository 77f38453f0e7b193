"""Estimates of the time left: none beyond the time that a run has, and none by its loading."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from outpace.cli.progress import TimeLeft, counting


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


def test_the_time_of_loading_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines tell the time left from the second step on, by what steps took after the first."""
    now = [0.0]
    monkeypatch.setattr("outpace.cli.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with counting(Console(file=out, width=200), "bench run") as steps:
        steps.expect(11)
        for now[0], what in ((300.0, "plain"), (310.0, "suffix"), (320.0, "auto")):
            steps.done(what)
    first, last = out.getvalue().splitlines()
    assert first == "bench run: 2 of 11 steps (suffix), 5 min 10 s so far, about 1 min 30 s left"
    assert last == "bench run: 3 of 11 steps (auto), 5 min 20 s so far, about 1 min 20 s left"
