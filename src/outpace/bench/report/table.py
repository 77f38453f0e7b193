"""A report as tables: for the terminal, and as Markdown for a README."""

from __future__ import annotations

from collections.abc import Iterator

from outpace.bench.report.results import MethodResult, Report, SettingResult, TaskResult
from outpace.bench.stats.interval import Interval

HEADER = (
    "method",
    "tokens/s",
    "speed-up",
    "lowest",
    "decoding only",
    "accepted",
    "tokens/pass",
    "same text",
    "measured/predicted",
    "of memory bound",
    "drafting",
    "MB",
)
NARROW = ("method", "tok/s", "speed-up", "accepted", "tok/pass", "same", "of bound")
"""The columns that fit a terminal; files have all."""


def narrow_rows(cell: SettingResult) -> Iterator[tuple[str, ...]]:
    """Yields the columns of `NARROW`, a row per method."""
    kept = (0, 1, 2, 5, 6, 7, 9)
    for row in rows(cell):
        yield tuple(row[index] for index in kept)


def rows(cell: SettingResult) -> Iterator[tuple[str, ...]]:
    """Yields a row per method."""
    for method in cell.methods:
        yield (
            method.name if method.lossless else f"{method.name} (lossy)",
            f"{method.tokens_per_second:.1f}",
            _ratio(method.speedup),
            f"{min(method.speedup_by_job):.2f}" if method.speedup_by_job else "",
            _ratio(method.decode_speedup),
            f"{method.acceptance.rate:.2f}" if method.acceptance else "",
            f"{method.acceptance.length:.2f}" if method.acceptance else "",
            _same(method),
            f"{method.prediction.reached:.2f}" if method.prediction else "",
            f"{method.roof.fraction:.0%}" if method.roof else "",
            f"{method.split.draft / method.split.total:.0%}" if method.split else "",
            f"{method.own_bytes / 1e6:.0f}" if method.own_bytes else "",
        )


def tasks_of(cell: SettingResult) -> list[str]:
    """Returns the names of the tasks."""
    return [task.task for task in cell.methods[0].tasks]


def by_task(cell: SettingResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a header and rows: each method's speed-up on each task and, behind it, the tokens of
    a pass. There are as many columns as there are methods or tasks, whichever are fewer."""
    shown = [method for method in cell.methods if method.speedup is not None]
    cells = [[_on(task) for task in method.tasks] for method in shown]
    names, tasks = [method.name for method in shown], tasks_of(cell)
    if len(tasks) > len(names):
        found = zip(tasks, *cells, strict=True)
        return ("task", *names), list(found)
    return ("method", *tasks), [(name, *row) for name, row in zip(names, cells, strict=True)]


def _on(task: TaskResult) -> str:
    speedup = "" if task.speedup is None else f"{task.speedup.mean:.2f}"
    return f"{speedup} ({task.acceptance.length:.2f})" if task.acceptance else speedup


def left_out(report: Report) -> list[str]:
    """Returns a sentence about the methods that took no part in anything; none if all did."""
    found = report.provenance.get("left out")
    return [] if found is None else [f"Left out: {found}."]


def notes(cell: SettingResult) -> Iterator[str]:
    """Yields sentences that a reader of the table must know."""
    if cell.left_over:
        yield f"Prompts that fill no batch of {cell.batch}, and were not run: {cell.left_over}."
    for reason in dict.fromkeys(cell.refused.values()):
        names = [name for name, why in cell.refused.items() if why == reason]
        yield f"{', '.join(names)} did not take part: {reason}."
    for method in cell.methods:
        cause = cell.cause_of(method)
        if method.identity is not None and cause is not None:
            yield (
                f"{method.name}: {len(method.identity.differences)} of "
                f"{method.identity.compared} texts differ from the baseline's ({cause})."
            )
        if method.over_peers:
            ratios = sorted(method.over_peers.items(), key=lambda item: item[1].mean)
            listed = "; ".join(f"{ratio} x {peer}" for peer, ratio in ratios)
            yield f"{method.name} against the other programs: {listed}."
        if method.prediction is not None:
            parts = method.prediction
            yield (
                f"{method.name}: its parts' own times and its acceptance (alpha "
                f"{parts.alpha:.2f}) predict {parts.predicted:.2f}; measured "
                f"{parts.measured:.2f}, {parts.reached:.0%} of that."
            )
        if method.divergence is not None:
            yield f"{method.name} is lossy: {method.divergence.phrase}."


def title(cell: SettingResult) -> str:
    """Returns the heading of a table."""
    return f"batch {cell.batch}, temperature {cell.temperature:g}: {cell.texts}, {cell.tokens}"


def markdown(report: Report) -> str:
    """Returns all tables as Markdown; raises ``ConfigError`` where `Report.check` does."""
    report.check()
    lines = []
    for cell in report.cells:
        lines += [f"**{title(cell)}**", "", _line(HEADER), _line(["---"] * len(HEADER))]
        lines += [_line(row) for row in rows(cell)]
        if len(tasks_of(cell)) > 1:
            header, found = by_task(cell)
            lines += ["", "Speed-up by task (and tokens per pass):", ""]
            lines += [_line(header), _line(["---"] * len(header)), *map(_line, found)]
        lines += ["", *notes(cell), ""]
    lines += left_out(report)
    facts = report.provenance
    known = [facts[key] for key in ("cpu", "gpu", "threads", "dtype", "torch") if key in facts]
    lines.append(f"({', '.join(known)}; `{facts.get('command', '')}`)")
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ratio(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval}"


def _same(method: MethodResult) -> str:
    found = method.identity
    return "" if found is None else f"{found.identical}/{found.compared}"
