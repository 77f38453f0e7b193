"""The report's figures, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from outpace.bench.costs import Curve
from outpace.bench.library import extra
from outpace.bench.results import Cell, MethodResult, Report, Sweep

_COLOURS = ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#555555", "#b07d62", "#2e4057")


def figures(report: Report) -> dict[str, bytes]:
    """Returns the report's figures by name; those without data are left out."""
    found: dict[str, bytes] = {}
    for cell in report.cells:
        at = f"b{cell.batch}-t{cell.temperature:g}"
        drafting = [m for m in cell.methods if m.acceptance is not None]
        found[f"speedup-by-task-{at}"] = speedup_by_task(cell)
        if drafting:
            found[f"acceptance-by-position-{at}"] = acceptance_by_position(drafting)
        timed = [m for m in cell.methods if m.split is not None]
        if timed:
            found[f"time-split-{at}"] = time_split(timed)
        if cell.sweep is not None:
            found[f"speedup-by-length-{at}"] = speedup_by_length(cell.sweep)
    return found


def speedup_by_task(cell: Cell) -> bytes:
    """Bars per task and method, with the interval of each."""
    compared = [m for m in cell.methods if m.speedup is not None]
    names = [task.task for task in cell.methods[0].tasks]
    figure, axes = _figure(max(6.0, 1.0 + 0.28 * len(names) * max(1, len(compared))))
    width = 0.8 / max(1, len(compared))
    for index, method in enumerate(compared):
        rows = [(i, t.speedup) for i, t in enumerate(method.tasks) if t.speedup is not None]
        xs = [i + (index + 0.5) * width - 0.4 for i, _ in rows]
        means = [s.mean for _, s in rows]
        below = [s.mean - (s.low if s.low is not None else s.mean) for _, s in rows]
        above = [(s.high if s.high is not None else s.mean) - s.mean for _, s in rows]
        axes.bar(
            xs, means, width, yerr=[below, above], label=method.name, color=_colour(index),
            error_kw={"elinewidth": 1, "ecolor": "#333333"},
        )  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("speed-up over plain")
    return _png(figure, axes, legend=bool(compared))


def acceptance_by_position(methods: Sequence[MethodResult]) -> bytes:
    """Lines per method: accepted to a depth, and accepted there given all before it."""
    figure, axes = _figure()
    for index, method in enumerate(methods):
        found = method.acceptance
        assert found is not None
        for values, style, what in (
            (found.per_position, "-o", "reached and accepted"),
            (found.conditional, "--s", "given all before it"),
        ):
            depths = range(1, len(values) + 1)
            label = f"{method.name}, {what}"
            axes.plot(depths, values, style, color=_colour(index), label=label, markersize=4)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("acceptance")
    return _png(figure, axes)


def time_split(methods: Sequence[MethodResult]) -> bytes:
    """Stacked bars: where the time of one token goes."""
    figure, axes = _figure()
    left = [0.0] * len(methods)
    names = [m.name for m in methods]
    for index, part in enumerate(("draft", "verify", "sample", "other")):
        shares = []
        for method in methods:
            assert method.split is not None
            per_token = 1000 / method.tokens_per_second / (method.split.total or 1.0)
            shares.append(getattr(method.split, part) * per_token)
        axes.barh(names, shares, left=left, label=part, color=_colour(index))
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per token")
    return _png(figure, axes)


def speedup_by_length(sweep: Sweep) -> bytes:
    """Measured speed-up by draft length, what its parts' times predict, and the theory's curve."""
    figure, axes = _figure()
    ks = [p.k for p in sweep.points]
    means = [p.speedup.mean for p in sweep.points]
    lows = [p.speedup.low if p.speedup.low is not None else p.speedup.mean for p in sweep.points]
    highs = [p.speedup.high if p.speedup.high is not None else p.speedup.mean for p in sweep.points]
    errors = [
        [m - low for m, low in zip(means, lows, strict=True)],
        [high - m for m, high in zip(means, highs, strict=True)],
    ]
    axes.errorbar(ks, means, yerr=errors, fmt="o", color=_colour(0), label="measured", capsize=3)
    predicted = [p.predicted for p in sweep.points]
    axes.plot(ks, predicted, "--", color=_colour(1), label="predicted from its parts' times")
    theory = [p.theory for p in sweep.points]
    axes.plot(ks, theory, "-", color=_colour(2), label=f"theory, alpha = {sweep.alpha:.2f}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    # A wide interval of a noisy run must not flatten the curves: it may leave the frame.
    axes.set_ylim(0, 1.4 * max([1.0, *means, *predicted, *theory]))
    axes.set_xticks(ks)
    axes.set_xlabel("drafted tokens per round, K")
    axes.set_ylabel("decode speed-up over plain")
    return _png(figure, axes)


def cost_curves(curves: Sequence[Curve]) -> bytes:
    """Scoring n tokens, by batch and context, relative to scoring one; and drafting."""
    plot = extra("matplotlib.figure", "a plot", "outpace[bench]")
    figure = plot.Figure(figsize=(10, 4), layout="constrained")
    verify, draft = figure.subplots(1, 2)
    for index, curve in enumerate(curves):
        label = f"batch {curve.batch}, context {curve.context}"
        for axes, points in ((verify, curve.verify), (draft, curve.draft)):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            milliseconds = [1000 * y for y in ys]
            axes.plot(xs, milliseconds, "-o", color=_colour(index), label=label, markersize=4)
    verify.set_xlabel("scored tokens per row, n")
    verify.set_ylabel("t_verify(n), ms")
    draft.set_xlabel("drafted tokens per row, K")
    draft.set_ylabel("t_draft(K), ms")
    for axes in (verify, draft):
        axes.set_ylim(bottom=0)
    return _png(figure, verify)


def speedup_allowed(curves: Sequence[Curve]) -> bytes:
    """The greatest speed-up that these times allow, by acceptance, and its draft length."""
    figure, axes = _figure()
    for index, curve in enumerate(curves):
        alphas = [row.alpha for row in curve.best]
        label = f"batch {curve.batch}, context {curve.context}"
        axes.plot(alphas, [row.speedup for row in curve.best], "-o", color=_colour(index),
                  label=label, markersize=4)  # fmt: skip
        for row in curve.best:
            axes.annotate(f"K={row.k}", (row.alpha, row.speedup), fontsize=7, xytext=(0, 4),
                          textcoords="offset points", ha="center")  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("acceptance rate, alpha")
    axes.set_ylabel("greatest speed-up over plain")
    return _png(figure, axes)


def _figure(width: float = 6.0) -> tuple[Any, Any]:
    # Without pyplot: it would keep every figure and choose a screen.
    plot = extra("matplotlib.figure", "a plot", "outpace[bench]")
    figure = plot.Figure(figsize=(min(width, 14.0), 3.6), layout="constrained")
    return figure, figure.add_subplot()


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _png(figure: Any, axes: Any, legend: bool = True) -> bytes:
    for each in figure.axes:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    if legend:
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7,
            frameon=False,
        )  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
