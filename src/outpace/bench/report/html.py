"""Reports as one HTML file that holds its figures and fetches nothing."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from outpace.bench.report.results import UNEXPLAINED, Report
from outpace.bench.run.costs import CostReport
from outpace.core.extras import extra


def require_jinja() -> None:
    """Raises ``ConfigError`` with the remedy where jinja2 is not installed."""
    _jinja()


def report_html(report: Report, figures: Mapping[str, bytes]) -> str:
    """Returns the page of a benchmark run.

    figures: PNG images by name, of which those that the page knows are shown. Raises
    ``ConfigError`` where `Report.check` does.
    """
    report.check()
    return _page(
        "report.html.j2", report=report, figures=_embedded(figures), unexplained=UNEXPLAINED
    )


def cost_html(report: CostReport, figures: Mapping[str, bytes]) -> str:
    """Returns the page of measured cost curves, with all of these PNG images."""
    return _page("cost.html.j2", report=report, figures=_embedded(figures))


def write_figures(folder: Path, figures: Mapping[str, bytes]) -> None:
    """Writes each figure as ``name.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in figures.items():
        (folder / f"{name}.png").write_bytes(png)


def _embedded(figures: Mapping[str, bytes]) -> dict[str, str]:
    return {
        name: "data:image/png;base64," + base64.b64encode(png).decode()
        for name, png in figures.items()
    }


def _page(template: str, **values: Any) -> str:
    jinja = _jinja()
    folder = files("outpace.bench.report") / "templates"
    environment = jinja.Environment(
        loader=jinja.DictLoader({f.name: f.read_text("utf-8") for f in folder.iterdir()}),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page: str = environment.get_template(template).render(**values)
    return page


def _jinja() -> Any:
    return extra("jinja2", "an HTML report", "outpace[bench]")
