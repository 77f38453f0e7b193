"""The curves of training runs, as one image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.train.measures import Measure


class Curves:
    """Draws the reports of one run or of several, from the logs that they leave: those of earlier
    sittings are among them."""

    def __init__(self, png: Path | None) -> None:
        """png: the image; None: nothing is drawn. Raises ``ConfigError`` where it cannot be
        written or drawn, before hours are spent."""
        self._png = png
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

        lines = log.read_text(encoding="utf-8").splitlines()
        self._reports[name] = [json.loads(line) for line in lines]
        self._png.write_bytes(training_figure(self._reports, measure.key))
