"""Figures show every name as it is, whole, and every method in one colour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matplotlib.colors import to_hex
from tests.bench.reports import report, wide_report

from outpace.bench import plots
from outpace.bench.costs import curve_of
from outpace.bench.plots import cost_figures, figures
from outpace.bench.theory import Times

LONG = [
    f"draft_model K={k} token model=a-drafter-with-quite-a-long-name-instruct-0.5B-of-step-{k}000"
    for k in range(1, 5)
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The matplotlib figures of which images are made during a test."""
    found: list[Any] = []
    png = plots._png

    def kept(figure: Any, axes: Any) -> bytes:
        found.append(figure)
        return png(figure, axes)

    monkeypatch.setattr(plots, "_png", kept)
    return found


def labels_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_dollar_signs_are_no_formula(drawn: list[Any]) -> None:
    tasks = ["$HOME and $PATH", "$x_$ {"]
    figures(wide_report(["a $ b $ c_", "ngram"], tasks))
    shown = [label.get_text() for label in drawn[0].axes[0].get_xticklabels()]
    assert shown == tasks
    assert "a $ b $ c_" in labels_of(drawn[0])


def test_a_method_keeps_its_colour_in_all_figures(drawn: list[Any]) -> None:
    """Also where another method does not take part."""
    names = ["ngram", "draft_model", "draft_tree", "hf"]
    found = list(figures(wide_report(names, ["story", "code"])))
    by_name = dict(zip(found, drawn, strict=True))
    colours: dict[str, set[str]] = {}
    for at in ("b1-t0", "b4-t0"):
        for bars in by_name[f"speedup-by-task-{at}"].axes[0].containers:
            if hasattr(bars, "patches"):
                colours.setdefault(bars.get_label(), set()).add(
                    to_hex(bars.patches[0].get_facecolor())
                )
        for line in by_name[f"acceptance-by-position-{at}"].axes[0].lines:
            if line.get_label() in names:
                colours.setdefault(line.get_label(), set()).add(to_hex(line.get_color()))
    measured = by_name["speedup-by-length-b1-t0"].axes[0].containers[0]
    colours["ngram"].add(to_hex(measured.lines[0].get_color()))
    assert set(colours) == set(names)
    assert all(len(own) == 1 for own in colours.values()), colours
    assert len(set().union(*colours.values())) == len(names)
    parts = {to_hex(p.get_facecolor()) for p in by_name["time-split-b1-t0"].axes[0].patches}
    assert not parts & set().union(*colours.values()), "a part of a round looks like a method"


def test_long_names_are_inside_the_figure(drawn: list[Any]) -> None:
    figures(wide_report(LONG, ["a long name of a task about summarising", "maths"]))
    for figure in drawn:
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        assert legend.x0 >= 0
        assert legend.x1 <= figure.bbox.width
        assert legend.height < 0.5 * figure.bbox.height
        for axes in figure.axes:
            assert axes.get_window_extent().width > 0.4 * figure.bbox.width


def test_whole_numbers_have_ticks_at_whole_numbers(drawn: list[Any]) -> None:
    base = report()
    shallow = replace(
        base.cells[0].methods[1].acceptance,
        drafted_per_position=(33,),
        accepted_per_position=(30,),
        judged_per_position=(33,),
    )
    methods = tuple(replace(m, acceptance=shallow) for m in base.cells[0].methods)
    for cell in (base.cells[0], replace(base.cells[0], methods=methods)):
        figures(replace(base, cells=(cell,)))
    cost_figures([curve_of(1, 128, Times({1: 0.01, 2: 0.02}, {1: 0.05, 2: 0.06, 3: 0.07}))])
    counted = [
        axes
        for figure in drawn
        for axes in figure.axes
        if axes.get_xlabel().startswith(("position", "drafted", "scored"))
    ]
    assert len(counted) == 10
    for axes in counted:
        assert all(float(tick).is_integer() for tick in axes.get_xticks()), axes.get_xlabel()


def test_the_cost_of_a_token_is_drawn_by_method(drawn: list[Any]) -> None:
    names = ["ngram", "draft_model"]
    found = list(figures(wide_report(names, ["story"])))
    figure = dict(zip(found, drawn, strict=True))["cost-by-column-b1-t0"]
    verify, draft = figure.axes
    assert labels_of(figure) == names
    assert [list(line.get_ydata()) for line in verify.lines] == [[50.0, 60.0]] * 2
    assert [list(line.get_xdata()) for line in draft.lines] == [[3]] * 2


def test_batch_sizes_are_compared_where_there_are_several(drawn: list[Any]) -> None:
    found = list(figures(wide_report(["ngram", "draft_model"], ["story"])))
    figure = dict(zip(found, drawn, strict=True))["speedup-by-batch-t0"]
    assert labels_of(figure) == ["ngram", "draft_model"]
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert [list(line.get_xdata()) for line in lines] == [[1], [1, 4]]
    assert not [name for name in figures(report()) if name.startswith("speedup-by-batch")]
