"""The figures of a report, as PNG images."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from outpace.bench.costs import CostReport, Curve
from outpace.bench.results import MethodResult, Report, SettingResult, Sweep
from outpace.bench.statistics import Interval
from outpace.core.extras import extra

_COLOURS = (
    *("#1f6f8b", "#d1495b", "#e0952b", "#4f8f6c", "#8d6a9f", "#b07d62", "#2e4057", "#c2709c"),
    *("#7fb7c9", "#eaa0a8", "#f0cb8a", "#a5cdb6", "#c4b1d0", "#d8bfae", "#8a97a8", "#e3bcd2"),
)
"""The colours of methods, or of the curves of a cost report: each keeps its own in all figures."""
_PARTS = {"draft": "#3b3b3b", "verify": "#8c8c8c", "sample": "#c4c4c4", "other": "#e6e6e6"}
"""The colours of the parts of a round: greys, which no method has."""
_LABEL, _TICK = 60, 28
"""Characters after which a label of the legend, or of a tick, goes on in a new line."""
_CHARACTER, _HANDLE, _LINE = 0.055, 0.6, 0.16
"""Inches that a legend needs per character, for the sample beside a label, and per line."""

Colours = Mapping[str, str]
Points = Sequence[tuple[int, float]]
"""Seconds by a number of tokens."""


def require_matplotlib() -> None:
    """Raises ``ConfigError`` with the remedy where matplotlib is not installed."""
    _matplotlib("figure")


def figures(report: Report | CostReport) -> dict[str, bytes]:
    """Returns the images of a report by name; figures without data are left out."""
    if isinstance(report, CostReport):
        return cost_figures(report.curves)
    names = dict.fromkeys(method.name for cell in report.cells for method in cell.methods)
    colours = {name: _colour(index) for index, name in enumerate(names)}
    found: dict[str, bytes] = {}
    with _settings():
        for cell in report.cells:
            at = f"b{cell.batch}-t{cell.temperature:g}"
            for name, png in _of_setting(cell, colours).items():
                found[f"{name}-{at}"] = png
        for temperature in dict.fromkeys(cell.temperature for cell in report.cells):
            cells = [cell for cell in report.cells if cell.temperature == temperature]
            if len(cells) > 1:
                found[f"speedup-by-batch-t{temperature:g}"] = _speedup_by_batch(cells, colours)
    return found


def cost_figures(curves: Sequence[Curve]) -> dict[str, bytes]:
    """Returns the images of a cost report by name."""
    with _settings():
        found = {"cost-curves": _cost_curves(curves)}
        if any(curve.draft for curve in curves):
            found["speedup-allowed"] = _speedup_allowed(curves)
    return found


def load_figure(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> bytes:
    """Returns the image of a server under load: throughput, and the time of a token, by the number
    of clients. found: by what requests ask for, then by clients, the figures of
    `outpace.bench.serving.summary`."""
    with _settings():
        figure, both = _figure(9.0, columns=2)
        for index, (kind, by_clients) in enumerate(found.items()):
            clients = sorted(by_clients)
            for axes, name, scale in ((both[0], "tokens/s", 1), (both[1], "TPOT p50 (s)", 1000)):
                values = [by_clients[count][name] * scale for count in clients]
                axes.plot(clients, values, "o-", color=_colour(index), label=f"speculative={kind}")
        for axes, label in zip(both, ("tokens/s", "ms per token (median)"), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_xticks(clients, [str(count) for count in clients])
            axes.minorticks_off()
            axes.set_xlabel("clients")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        return _png(figure, both[0])


def training_figure(found: Mapping[str, Sequence[Mapping[str, Any]]], measure: str) -> bytes:
    """Returns the image of training runs: the loss and the figure on held-out text, by the tokens
    that were learned from. found: the reports of each run, as its log holds them. measure: the
    figure's key in there."""
    with _settings():
        figure, both = _figure(9.0, columns=2)
        for index, (name, reports) in enumerate(found.items()):
            tokens = [report["tokens"] for report in reports]
            for axes, key in zip(both, ("loss", measure), strict=True):
                values = [report[key] for report in reports]
                axes.plot(tokens, values, ".-", color=_colour(index), label=name)
        for axes, label in zip(
            both, ("loss", f"{measure.replace('_', ' ')}, held out"), strict=True
        ):
            axes.set_xlabel("tokens learned from")
            axes.set_ylabel(label)
        return _png(figure, both[0])


def _of_setting(cell: SettingResult, colours: Colours) -> dict[str, bytes]:
    found = {"speedup-by-task": _speedup_by_task(cell, colours)}
    if drafting := [m for m in cell.methods if m.acceptance is not None]:
        found["acceptance-by-position"] = _acceptance_by_position(drafting, colours)
    if timed := [m for m in cell.methods if m.split is not None]:
        found["time-split"] = _time_split(timed)
    costs = {m.name: m.prediction for m in cell.methods if m.prediction is not None}
    if costs:
        found["cost-by-column"] = _costs(
            [(n, colours[n], one.verify_seconds, one.draft_seconds) for n, one in costs.items()]
        )
    if cell.sweep is not None:
        found["speedup-by-length"] = _speedup_by_length(cell.sweep, colours)
    return found


# -- the figures of a run ------------------------------------------------------------------------


def _speedup_by_task(cell: SettingResult, colours: Colours) -> bytes:
    """Bars by task and method, with the interval of each."""
    compared = [m for m in cell.methods if m.speedup is not None]
    names = [task.task for task in cell.methods[0].tasks]
    figure, axes = _figure(1.0 + 0.28 * len(names) * max(1, len(compared)))
    width = 0.8 / max(1, len(compared))
    for index, method in enumerate(compared):
        rows = [(i, t.speedup) for i, t in enumerate(method.tasks) if t.speedup is not None]
        xs = [i + (index + 0.5) * width - 0.4 for i, _ in rows]
        means, errors = _with_errors([s for _, s in rows])
        axes.bar(
            xs, means, width, yerr=errors, label=method.name, color=colours[method.name],
            error_kw={"elinewidth": 1, "ecolor": "#333333"},
        )  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), _wrapped(names), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("speed-up over plain")
    return _png(figure, axes)


def _acceptance_by_position(methods: Sequence[MethodResult], colours: Colours) -> bytes:
    """Two lines by method: accepted to a depth, and accepted there given all before it."""
    figure, axes = _figure()
    deepest = 1
    for method in methods:
        found = method.acceptance
        assert found is not None
        colour = colours[method.name]
        for values, style in ((found.per_position, "-o"), (found.conditional, "--s")):
            axes.plot(range(1, len(values) + 1), values, style, color=colour, markersize=4)
            deepest = max(deepest, len(values))
        axes.plot([], [], color=colour, label=method.name)
    axes.plot([], [], "-o", color="black", label="reached and accepted", markersize=4)
    axes.plot([], [], "--s", color="black", label="accepted, given all before it", markersize=4)
    axes.set_xlim(0.5, deepest + 0.5)
    axes.set_ylim(0, 1.02)
    _whole_numbers(axes)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("acceptance")
    return _png(figure, axes)


def _time_split(methods: Sequence[MethodResult]) -> bytes:
    """A bar by method, stacked from the parts of the time of one token."""
    figure, axes = _figure(height=1.2 + 0.3 * len(methods))
    left = [0.0] * len(methods)
    bars = range(len(methods))
    for part, colour in _PARTS.items():
        shares = []
        for method in methods:
            assert method.split is not None
            per_token = 1000 / method.tokens_per_second / (method.split.total or 1.0)
            shares.append(getattr(method.split, part) * per_token)
        axes.barh(
            bars, shares, left=left, label=part, color=colour, edgecolor="#777777", linewidth=0.4
        )
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_yticks(bars, _wrapped([m.name for m in methods]), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per token")
    return _png(figure, axes)


def _speedup_by_length(sweep: Sweep, colours: Colours) -> bytes:
    """Measured speed-up by draft length, the prediction from the parts' times, and the theory."""
    figure, axes = _figure()
    ks = [p.k for p in sweep.points]
    means, errors = _with_errors([p.speedup for p in sweep.points])
    axes.errorbar(
        ks, means, yerr=errors, fmt="o", color=colours[sweep.method], capsize=3,
        label=f"{sweep.method}, measured",
    )  # fmt: skip
    predicted = [p.predicted for p in sweep.points if p.predicted is not None]
    theory = [p.theory for p in sweep.points if p.theory is not None]
    if predicted and theory:
        axes.plot(ks, predicted, "--", color="#555555", label="predicted from its parts' times")
        axes.plot(ks, theory, "-", color="#aaaaaa", label=f"theory, alpha = {sweep.alpha:.2f}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    # The wide interval of a noisy run may leave the frame, so that it does not flatten the curves.
    axes.set_ylim(0, 1.4 * max([1.0, *means, *predicted, *theory]))
    axes.set_xticks(ks)
    axes.set_xlabel("drafted tokens per round, K")
    axes.set_ylabel("decode speed-up over plain")
    return _png(figure, axes)


def _speedup_by_batch(cells: Sequence[SettingResult], colours: Colours) -> bytes:
    """A line by method: its speed-up by the number of texts that are decoded at once."""
    figure, axes = _figure()
    for name, colour in colours.items():
        found = [(c.batch, m.speedup) for c in cells for m in c.methods if m.name == name]
        known = [(batch, speedup) for batch, speedup in found if speedup is not None]
        if known:
            means, errors = _with_errors([speedup for _, speedup in known])
            xs = [batch for batch, _ in known]
            axes.errorbar(xs, means, yerr=errors, fmt="-o", color=colour, capsize=3, label=name)
    batches = sorted({cell.batch for cell in cells})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("texts at once")
    axes.set_ylabel("speed-up over plain")
    return _png(figure, axes)


def _with_errors(intervals: Sequence[Interval]) -> tuple[list[float], list[list[float]]]:
    """Means, and how far their intervals reach below and above; 0 where there is none."""
    means = [one.mean for one in intervals]
    below = [0.0 if one.low is None else one.mean - one.low for one in intervals]
    above = [0.0 if one.high is None else one.high - one.mean for one in intervals]
    return means, [below, above]


# -- the figures of a cost report ------------------------------------------------------------------


def _cost_curves(curves: Sequence[Curve]) -> bytes:
    return _costs(
        [(_named(one), _colour(index), one.verify, one.draft) for index, one in enumerate(curves)]
    )


def _costs(lines: Sequence[tuple[str, str, Points, Points]]) -> bytes:
    """Milliseconds by scored tokens, and by drafted tokens. lines: name, colour, and the seconds of
    each."""
    figure, (verify, draft) = _figure(10.0, 4.0, columns=2)
    for name, colour, *both in lines:
        for axes, points in zip((verify, draft), both, strict=True):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            milliseconds = [1000 * y for y in ys]
            axes.plot(xs, milliseconds, "-o", color=colour, label=name, markersize=4)
    verify.set_xlabel("scored tokens per row, n")
    verify.set_ylabel("t_verify(n), ms")
    draft.set_xlabel("drafted tokens per row, K")
    draft.set_ylabel("t_draft(K), ms")
    for axes in (verify, draft):
        axes.set_ylim(bottom=0)
        _whole_numbers(axes)
    return _png(figure, verify)


def _speedup_allowed(curves: Sequence[Curve]) -> bytes:
    """The greatest speed-up that these times allow, by acceptance rate, and its draft length."""
    figure, axes = _figure()
    for index, curve in enumerate(curves):
        alphas = [row.alpha for row in curve.best]
        axes.plot(alphas, [row.speedup for row in curve.best], "-o", color=_colour(index),
                  label=_named(curve), markersize=4)  # fmt: skip
        for row in curve.best:
            axes.annotate(f"K={row.k}", (row.alpha, row.speedup), fontsize=7, xytext=(0, 4),
                          textcoords="offset points", ha="center")  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("acceptance rate, alpha")
    axes.set_ylabel("greatest speed-up over plain")
    return _png(figure, axes)


def _named(curve: Curve) -> str:
    return f"batch {curve.batch}, context {curve.context}"


# -- what all figures share ------------------------------------------------------------------------


def _figure(width: float = 6.0, height: float = 3.4, columns: int = 1) -> tuple[Any, Any]:
    """A figure of n inches, and its axes: one, or one by column."""
    # Without pyplot, which would keep every figure and look for a screen.
    size = (min(max(6.0, width), 14.0), height)
    figure = _matplotlib("figure").Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns)


def _png(figure: Any, axes: Any) -> bytes:
    """The image of a figure, with a legend below for what is labelled in ``axes``."""
    for each in figure.axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        _add_legend(figure, handles, labels)
    buffer = io.BytesIO()
    # "tight" makes the image as large as what is drawn, so that no label is cut at its edge.
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    return buffer.getvalue()


def _add_legend(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds a legend below the axes, in as many columns as fit, and makes the figure higher by
    what the legend takes."""
    wrapped = [textwrap.fill(label, _LABEL) for label in labels]
    longest = max(len(line) for label in wrapped for line in label.splitlines())
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int(width / (_HANDLE + _CHARACTER * longest))))
    lines = sum(label.count("\n") + 1 for label in wrapped)
    figure.set_size_inches(width, height + _LINE * -(-lines // columns))
    figure.legend(
        handles, wrapped, loc="outside lower center", ncols=columns, fontsize=7, frameon=False
    )


def _wrapped(names: Sequence[str]) -> list[str]:
    return [textwrap.fill(name, _TICK) for name in names]


def _whole_numbers(axes: Any) -> None:
    """Lets the x axis have ticks at whole numbers only, and if there is but one, one tick."""
    locator = _matplotlib("ticker").MaxNLocator(integer=True, min_n_ticks=1)
    axes.xaxis.set_major_locator(locator)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _settings() -> AbstractContextManager[Any]:
    """The settings that all figures are drawn under.

    Text is drawn as it is: matplotlib would otherwise read what stands between two dollar signs,
    such as in the name of a task, as a formula.
    """
    matplotlib = extra("matplotlib", "a plot", "outpace[bench]")
    context: AbstractContextManager[Any] = matplotlib.rc_context(
        {"text.parse_math": False, "font.size": 9}
    )
    return context


def _matplotlib(module: str) -> Any:
    return extra(f"matplotlib.{module}", "a plot", "outpace[bench]")
