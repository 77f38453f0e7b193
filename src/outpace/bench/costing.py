"""``outpace bench cost`` from models to files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from outpace.bench.costs import CostReport, Curve, measure_curves
from outpace.bench.memory import read_bandwidth
from outpace.bench.provenance import provenance
from outpace.bench.results import restored
from outpace.bench.session import Engines, engine
from outpace.errors import ConfigError


def cost_report(
    engines: Engines,
    batches: Sequence[int],
    contexts: Sequence[int],
    temperature: float,
    repeats: int,
    longest: int,
    tick: Callable[[str], None],
) -> CostReport:
    """Measures the first configuration's engine."""
    if not batches or not contexts:
        raise ConfigError("--batch and --context must name at least one number each.")
    facts = provenance()
    llm = engine(engines, engines.configs[0] if engines.configs else None, max(batches))
    model = llm.config.options.get("model")
    return CostReport(
        provenance={**facts, "dtype": str(llm.target.dtype).removeprefix("torch.")},
        model=Path(llm.target.name).name,
        drafter=llm.config.method if model is None else f"{llm.config.method} {Path(model).name}",
        bandwidth=read_bandwidth(llm.target.device),
        curves=measure_curves(llm, batches, contexts, temperature, repeats, longest, tick),
    )


def cost_rows(curve: Curve) -> tuple[str, list[str], list[list[str]]]:
    """Returns a title, a header and rows: one row per number of tokens."""
    verify, draft = dict(curve.verify), dict(curve.draft)
    header = ["tokens", "scored, ms", "over one", *(["drafted, ms"] if draft else [])]
    rows = []
    for count in sorted({*verify, *draft}):
        over = f"{verify[count] / verify[1]:.2f}" if count in verify else ""
        row = [str(count), _ms(verify.get(count)), over, _ms(draft.get(count))]
        rows.append(row[: len(header)])
    best = ", ".join(f"{b.alpha:g}: {b.speedup:.2f}x K={b.k}" for b in curve.best)
    title = (
        f"batch {curve.batch}, context {curve.context}; at most {curve.ceiling:.2f}x "
        f"(K={curve.ceiling_k}); by acceptance {best}"
    )
    return title, header, rows


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f}"


def write_cost(
    report: CostReport, json_path: Path | None, html: Path | None, png: Path | None
) -> None:
    """Writes what was asked for."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", "utf-8")
    if html is None and png is None:
        return
    from outpace.bench.html import cost_html, write_figures
    from outpace.bench.plots import cost_curves, speedup_allowed

    made = {"cost-curves": cost_curves(report.curves)}
    if any(curve.draft for curve in report.curves):
        made["speedup-allowed"] = speedup_allowed(report.curves)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(cost_html(report, made), encoding="utf-8")
    if png is not None:
        write_figures(png, made)


def read_cost(path: Path) -> CostReport:
    """Returns the report that `write_cost` wrote."""
    try:
        found: CostReport = restored(CostReport, json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no report of outpace bench cost ({error}).") from error
    return found
