"""The distribution gate's report as the table in the documentation: a line by rule and way of
drafting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.audit.gate.enumeration import TOLERANCE, DistributionReport, DistributionRow

HEAD = ("rule", "drafted", "worst TV", "mean TV", "chain 3", "one", "best", "of two", "best")


def markdown(report: DistributionReport) -> str:
    """Returns one line for each rule and way of drafting.

    worst and mean TV, the total variation from the target's distribution, are over all shapes.
    "chain 3" is the mean number of tokens accepted of a chain of three, "one" and "of two" the
    chance that one of one or two siblings is accepted, each followed by the largest chance that any
    exact rule has.
    """
    keys = dict.fromkeys((row.rule, row.drafted) for row in report.rows)
    lines = [_line(HEAD), _line(["---"] * 2 + ["---:"] * (len(HEAD) - 2))]
    for rule, drafted in keys:
        rows = [row for row in report.rows if (row.rule, row.drafted) == (rule, drafted)]
        lines.append(_line([rule, drafted, *_numbers(rows)]))
    return "\n".join(lines)


def _numbers(rows: Sequence[DistributionRow]) -> list[str]:
    worst = max(row.worst_tv for row in rows)
    mean = sum(row.mean_tv for row in rows) / len(rows)
    by_shape = {row.shape: row for row in rows}
    chain, one, two = (by_shape.get(name) for name in ("chain 3", "chain 1", "2 siblings"))
    return [
        _distance(worst),
        _distance(mean),
        f"{chain.accepted:.3f}" if chain else "",
        *((f"{one.one_step:.3f}", f"{one.optimum:.3f}") if one else ("", "")),
        *((f"{two.one_step:.3f}", f"{two.optimum:.3f}") if two else ("", "")),
    ]


def _distance(value: float) -> str:
    return "0" if value <= TOLERANCE else f"{value:.3f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
