"""The findings of audits as tables and sentences for the terminal, and as plain dicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.audit.diff import DiffReport
from outpace.audit.gate.enumeration import DistributionReport
from outpace.audit.model import ModelReport, Reading


def as_dict(report: Any) -> dict[str, Any]:
    """Returns a report's fields and its verdict, fit for JSON."""
    found = (
        report.as_dict() if isinstance(report, DistributionReport) else dataclasses.asdict(report)
    )
    return {"ok": is_good(report), **_plain(found)}


def is_good(report: Any) -> bool:
    """Returns a report's verdict."""
    return bool(report.passed if isinstance(report, DistributionReport) else report.ok)


def _plain(value: Any) -> Any:
    """The value with None in place of infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- distribution ----------------------------------------------------------------------------------


def distribution_findings(report: DistributionReport) -> Group:
    """Returns what `audit distributions` prints."""
    title = f"joint distribution of the next tokens, exact to {report.tolerance:g}"
    table = Table(title=title, box=SIMPLE_HEAD)  # without lines it fits into 80 columns
    names = ("rule", "drafts", "shape", "worst TV", "accepted", "one step", "optimum", "verdict")
    for name in names:
        table.add_column(name)
    for row in report.rows:
        exact = row.worst_tv <= report.tolerance
        table.add_row(
            row.rule,
            row.drafted,
            row.shape,
            f"{row.worst_tv:.1g}",
            f"{row.accepted:.3f}",
            f"{row.one_step:.3f}",
            f"{row.optimum:.3f}",
            "exact" if exact else "lossy" if row.passed else "FAILED",
        )
    faults = dict.fromkeys(f"{row.rule}: {row.fault}." for row in report.rows if row.fault)
    return Group(table, *map(Text, [*faults, "OK" if report.passed else "FAILED"]))


# -- model -------------------------------------------------------------------------------------


def model_findings(report: ModelReport) -> Group:
    """Returns what `audit model` prints."""
    table = Table(title=f"{report.method}, verify={report.rule}: {report.samples} texts")
    for column in ("claim", "tokens", "p-value", "most suspicious", "verdict"):
        table.add_column(column)
    table.add_row("text follows the plain distribution", *_reading(report.text))
    if report.drafts.observations:
        table.add_row("drafts follow the distribution they state", *_reading(report.drafts))
    verdict = "OK" if report.ok else "FAILED"
    return Group(table, *map(Text, [*_model_sentences(report), verdict]))


def _reading(reading: Reading) -> tuple[str, str, str, str]:
    verdict = f"REFUTED after {reading.alarmed_at}" if reading.alarm else "not refuted"
    # Without an alarm the leading bet means nothing: some bet always leads.
    suspect = reading.leading if reading.alarm else ""
    return str(reading.observations), f"{reading.p_value:.3g}", suspect, verdict


def _model_sentences(report: ModelReport) -> Iterable[str]:
    if report.stopped_of is not None:
        yield _stopped(report.samples, report.stopped_of)
    if not report.lossless:
        yield _declared(report.rule)
    yield from (f"BUG: {breach}" for breach in report.breaches)
    noise = report.noise
    if noise.excessive:
        yield (
            f"BUG: logits of drafted tokens are off by {noise.measured:.2g}, more than rounding "
            f"({noise.cap:.2g})."
        )
    yield (
        f"False alarms: at most {report.alpha:g} of runs, whenever stopped. Logits of drafted and "
        f"plain passes differ by up to {noise.measured:.2g}; {noise.tolerance:.2g} is allowed for."
    )
    if not report.text.observations:
        yield "No text has a token: nothing was tested. Give other prompts or options."
        return
    if report.drafts_expected and not report.drafted:
        yield NOTHING_DRAFTED
        return
    few = _few(report.drafted, report.text.observations, report.drafts_expected)
    yield f"{report.drafted} tokens were drafted, {report.accepted} accepted{few}."
    caught = ", ".join(f"{way} {_variation(tv)}" for way, tv in report.detectable.items())
    yield f"Would have caught with 90 % power a total variation per token of: {caught}."


NOTHING_DRAFTED = (
    "Nothing was drafted: plain decoding was compared with itself. Give prompts for which the "
    "drafter finds something, more tokens, or a number of drafted tokens (-k)."
)


def _stopped(texts: int, of: int) -> str:
    return f"Stopped: this is what {texts} of {of} texts show."


def _declared(rule: str) -> str:
    return f"verify={rule} is lossy by declaration: it is meant to change the distribution."


def _variation(value: float | None) -> str:
    return "none (too few tokens)" if value is None else f"{value:.3f}"


def _few(drafted: int, written: int, expected: bool) -> str:
    """What is to be said of texts in which little was drafted."""
    return ": few of them, so that -k 4 tests more" if expected and 5 * drafted < written else ""


# -- diff --------------------------------------------------------------------------------------


def diff_findings(report: DiffReport) -> Group:
    """Returns what `audit diff` prints."""
    lines = [
        f"{mode}: {count} texts, {report.tokens[mode]} tokens, "
        f"{sum(found.mode == mode for found in report.differences)} differ"
        for mode, count in report.texts.items()
    ]
    if report.stopped_of is not None:
        lines.append(_stopped(sum(report.texts.values()), report.stopped_of))
    if report.skipped:
        lines.append(f"not run: {report.skipped}")
    if not report.lossless:
        lines.append(_declared(report.rule))
    drafted, written = sum(report.drafted.values()), sum(report.tokens.values())
    few = _few(drafted, written, report.drafts_expected)
    lines.append(f"{drafted} tokens were drafted{few}")
    lines += [f"{mode}: {NOTHING_DRAFTED}" for mode in report.undrafted]
    noise = report.noise
    lines.append(
        f"logits scored as drafted and read plainly differ by up to {noise.measured:.2g}; "
        f"tolerance {noise.tolerance:.2g}"
    )
    if noise.excessive:
        lines.append(f"BUG: that is more than rounding ({noise.cap:.2g})")
    table = Table(title=f"{report.method}: first differences")
    for column in ("mode", "prompt", "position", "plain", "speculative", "verdict"):
        table.add_column(column)
    for found in report.differences:
        table.add_row(
            found.mode,
            str(found.prompt),
            str(found.position),
            _token(found.plain, found.plain_text),
            _token(found.speculative, found.speculative_text),
            found.verdict,
        )
    tables = [table] if report.differences else []
    lines += _deviations(report)
    return Group(*tables, *map(Text, [*lines, "OK" if report.ok else "FAILED"]))


def _deviations(report: DiffReport) -> list[str]:
    found = [
        f"{one.mode}, prompt {one.prompt}, position {one.position}: plain decoding has token "
        f"{one.token}, one plain forward of the text chooses {one.best}: {one.verdict}"
        for one in report.deviations
    ]
    if not found:
        return ["without speculation, every token is what one plain forward chooses there"]
    return [*found[:10], *([f"and {len(found) - 10} more"] if len(found) > 10 else [])]


def _token(token: int | None, text: str) -> str:
    return "(ended)" if token is None else f"{token} {text!r}"


_PRINTED: Mapping[type, Callable[[Any], Group]] = {
    DistributionReport: distribution_findings,
    ModelReport: model_findings,
    DiffReport: diff_findings,
}


def findings(report: Any) -> Group:
    """Returns what an audit prints of its report."""
    return _PRINTED[type(report)](report)
