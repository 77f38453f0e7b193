"""The curves of training runs, as one image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from outpace.train.measures import Measure


class Curves:
    """Draws the reports of one run or of several, from the logs that they leave: those of earlier
    sittings are among them."""

    def __init__(self, console: Console, png: Path | None, draws: bool = True) -> None:
        """png: the image; None: nothing is drawn. draws: whether this process does; of several all
        check. Raises ``ConfigError`` where it cannot be written or drawn, before hours are spent.
        """
        self._console, self._png = console, png if draws else None
        self._reports: dict[str, list[dict[str, Any]]] = {}
        if png is not None:
            from outpace.bench.report.outputs import check_file
            from outpace.bench.report.plots import require_matplotlib

            check_file("--png", png)
            require_matplotlib()

    def draw(self, name: str, log: Path, measure: Measure) -> None:
        """Draws the curves of a run as far as it is, beside those of the runs drawn before."""
        if self._png is None or not log.exists():
            return
        from outpace.bench.report.plots import training_figure

        try:
            self._reports[name] = list(_reports(log, measure.key))
            self._png.write_bytes(training_figure(self._reports, measure.key))
        except OSError as error:  # which is no reason to end what has learned for hours
            self._console.print(f"--png: {error}; no more curves are drawn.", markup=False)
            self._png = None


def _reports(log: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the reports of a log, but for a line that a killed run has left unfinished. key: the
    measure that each has."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            report = json.loads(line)
            if isinstance(report, dict) and {"tokens", "loss", key} <= {*report}:
                yield report
