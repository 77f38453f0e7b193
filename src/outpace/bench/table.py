"""A report as tables: for the terminal, and as Markdown for a README."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench.results import MethodResult, Report, SettingResult, TaskResult
from outpace.bench.statistics import Interval

NOTHING = "nothing drafted"
"""Instead of a speed-up that no draft has made."""

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A header, and rows of as many cells."""


@dataclass(frozen=True)
class Column:
    """One column of the table of methods."""

    name: str
    value: Callable[[MethodResult], Any]
    """Returns None where a method has no such value: its cell stays empty."""
    form: str = ""
    """How the value is printed, as a format specification."""
    short: str | None = None
    """The column's name on a terminal; None where it is in files only, which have room for all."""

    def cell(self, method: MethodResult) -> str:
        """Returns what the column says about a method."""
        value = self.value(method)
        return "" if value is None else format(value, self.form)


def _same(method: MethodResult) -> str | None:
    found = method.identity
    return None if found is None else f"{found.identical}/{found.compared}"


def _speed_up(method: MethodResult) -> str | None:
    """The speed-up, in words where it is none of its own drafts."""
    return NOTHING if method.drafted_nothing else _phrase(method.speedup)


def _phrase(speedup: Interval | None) -> str | None:
    return None if speedup is None else speedup.phrase


def _lowest(method: MethodResult) -> float | None:
    return None if method.drafted_nothing else min(method.speedup_by_job, default=None)


COLUMNS = (
    Column("method", lambda m: m.name if m.lossless else f"{m.name} (lossy)", short="method"),
    Column("tokens/s", lambda m: m.tokens_per_second, ".1f", short="tok/s"),
    Column("speed-up", _speed_up, short="speed-up"),
    Column("lowest", _lowest, ".2f"),
    Column("decoding only", lambda m: None if m.drafted_nothing else _phrase(m.decode_speedup)),
    Column("accepted", lambda m: m.acceptance and m.acceptance.rate, ".2f", short="accepted"),
    Column("tokens/pass", lambda m: m.acceptance and m.acceptance.length, ".2f", short="tok/pass"),
    Column("same text", _same, short="same"),
    Column("measured/predicted", lambda m: m.prediction and m.prediction.reached, ".2f"),
    Column("of memory bound", lambda m: m.roof and m.roof.fraction, ".0%", short="of bound"),
    Column("drafting", lambda m: m.split and m.split.draft / m.split.total, ".0%"),
    Column("MB", lambda m: m.own_bytes / 1e6 if m.own_bytes else None, ".0f"),
)


def by_method(cell: SettingResult) -> Table:
    """Returns the table of methods with all columns."""
    return tuple(column.name for column in COLUMNS), _rows(cell, COLUMNS)


def narrow_by_method(cell: SettingResult) -> Table:
    """Returns the table of methods with the columns that fit a terminal."""
    kept = [column for column in COLUMNS if column.short is not None]
    return tuple(str(column.short) for column in kept), _rows(cell, kept)


def _rows(cell: SettingResult, columns: Sequence[Column]) -> list[tuple[str, ...]]:
    return [tuple(column.cell(method) for column in columns) for method in cell.methods]


def tasks_of(cell: SettingResult) -> list[str]:
    """Returns the names of the tasks."""
    return [task.task for task in cell.methods[0].tasks]


def by_task(cell: SettingResult) -> Table:
    """Returns a header and rows: each method's speed-up on each task and, after it, the tokens of
    a pass. There are as many columns as there are methods or tasks, whichever are fewer."""
    shown = [method for method in cell.methods if method.speedup is not None]
    cells = [[_on(task, method) for task in method.tasks] for method in shown]
    names, tasks = [method.name for method in shown], tasks_of(cell)
    if len(tasks) > len(names):
        found = zip(tasks, *cells, strict=True)
        return ("task", *names), list(found)
    return ("method", *tasks), [(name, *row) for name, row in zip(names, cells, strict=True)]


def _on(task: TaskResult, method: MethodResult) -> str:
    if method.rule is not None and task.acceptance is None:
        return NOTHING
    speedup = "" if task.speedup is None else task.speedup.ratio
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
        if method.account is not None:
            yield f"{method.name}: {method.account}."
        cause = cell.cause_of(method)
        if method.identity is not None and cause is not None:
            yield (
                f"{method.name}: {len(method.identity.differences)} of "
                f"{method.identity.compared} texts differ from the baseline's ({cause})."
            )
        if method.over_peers:
            ratios = sorted(method.over_peers.items(), key=lambda item: item[1].mean)
            listed = "; ".join(_against(peer, ratio) for peer, ratio in ratios)
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


def _against(peer: str, ratio: Interval) -> str:
    """Returns how fast a method is compared with another program.

    >>> _against("hf", Interval(1.5, 1.4, 1.6, 9)), _against("hf", Interval(0.98, 0.9, 1.1, 9))
    ('1.50 [1.40, 1.60] x hf', 'no difference [0.90, 1.10] to hf')
    """
    if ratio.differs:
        return f"{ratio} x {peer}"
    return f"no difference {ratio.bounds} to {peer}".replace("  ", " ")


def title(cell: SettingResult) -> str:
    """Returns the heading of a table."""
    return f"batch {cell.batch}, temperature {cell.temperature:g}: {cell.texts}, {cell.tokens}"


def markdown(report: Report) -> str:
    """Returns all tables as Markdown; raises ``ConfigError`` where `Report.check` does."""
    report.check()
    lines: list[str] = []
    for cell in report.cells:
        lines += [f"**{title(cell)}**", "", *_lines(by_method(cell))]
        if len(tasks_of(cell)) > 1:
            lines += ["", "Speed-up by task (and tokens per pass):", "", *_lines(by_task(cell))]
        lines += ["", *notes(cell), ""]
    lines += left_out(report)
    facts = report.provenance
    wanted = ("cpu", "instructions", "gpu", "threads", "dtype", "torch")
    known = [facts[key] for key in wanted if key in facts]
    lines.append(f"({', '.join(known)}; `{facts.get('command', '')}`)")
    return "\n".join(lines) + "\n"


def _lines(table: Table) -> list[str]:
    header, rows = table
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
