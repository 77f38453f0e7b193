"""The files that a benchmark writes: checked before the run, written after it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.bench.report.answers import answers
from outpace.bench.report.html import cost_html, report_html, require_jinja, write_figures
from outpace.bench.report.plots import cost_figures, figures, require_matplotlib
from outpace.bench.report.specbench import write_answers
from outpace.bench.report.table import markdown
from outpace.bench.run.costs import CostReport
from outpace.bench.run.session import Finished
from outpace.errors import ConfigError

Figures = Mapping[str, bytes]
"""Images in the PNG format, by name."""


@dataclass(frozen=True)
class OutputFiles:
    """Where to write what; None for what is not wanted."""

    json: Path | None = None
    html: Path | None = None
    png: Path | None = None
    """A folder: one image per figure."""
    markdown: Path | None = None
    spec_bench: Path | None = None
    """A folder: one answer file per method, batch size and temperature."""

    def check(self) -> None:
        """Raises ``ConfigError`` for a place that cannot be written to or a package that is
        missing, so that a long run is not lost for it."""
        for flag, file in (("--json", self.json), ("--html", self.html)):
            check_file(flag, file)
        check_file("--markdown", self.markdown)
        check_folder("--png", self.png)
        check_folder("--spec-bench", self.spec_bench)
        if self.html is not None:
            require_jinja()
        if self.html is not None or self.png is not None:
            require_matplotlib()

    def write(self, done: Finished) -> None:
        """Writes the results of a run, the figures last: a figure that cannot be drawn costs none
        of the results.

        Raises ``ConfigError`` before anything is written where `Report.check` does.
        """
        report = done.report
        report.check()
        if self.json is not None:
            _write(self.json, report.to_json() + "\n")
        if self.markdown is not None:
            _write(self.markdown, markdown(report))
        if self.spec_bench is not None:
            _write_answers(self.spec_bench, done)
        self._write_pages(lambda made: report_html(report, made), lambda: figures(report))

    def write_cost(self, report: CostReport) -> None:
        """Writes measured cost curves, the figures last."""
        if self.json is not None:
            _write(self.json, report.to_json() + "\n")
        self._write_pages(lambda made: cost_html(report, made), lambda: cost_figures(report.curves))

    def _write_pages(self, page: Callable[[Figures], str], draw: Callable[[], Figures]) -> None:
        """Writes the page with its numbers before anything is drawn, then once more with the
        figures, and the figures by themselves."""
        if self.html is not None:
            _write(self.html, page({}))
        if self.html is None and self.png is None:
            return
        made = draw()
        if self.html is not None:
            _write(self.html, page(made))
        if self.png is not None:
            write_figures(self.png, made)


def check_file(flag: str, file: Path | None) -> None:
    """Raises ``ConfigError`` where a file cannot be written; what is in it stays."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write {file} ({error.strerror}): name another file."
        ) from error


def check_folder(flag: str, folder: Path | None) -> None:
    """Raises ``ConfigError`` where no file can be made in a folder; makes the folder."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write into {folder} ({error.strerror}): name another folder."
        ) from error


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _write_answers(folder: Path, done: Finished) -> None:
    for setting in done.settings:
        result = setting.result
        for method in result.methods:
            found = answers(
                setting.runs, method.name, done.report.provenance["model"], done.tokenizer
            )
            # A method's name may hold options, and those spaces and slashes.
            name = re.sub(r"[^\w.=+-]+", "-", method.name).strip("-")
            file = f"{name}-b{result.batch}-t{result.temperature:g}.jsonl"
            write_answers(folder / file, found)
