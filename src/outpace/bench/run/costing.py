"""``outpace bench cost``: from the options of the command line to measured curves and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outpace.bench.report.provenance import provenance
from outpace.bench.run.costs import CostReport, Curve, measure_curves
from outpace.bench.run.memory import read_bandwidth
from outpace.bench.run.session import Engines, engine
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
    """Measures the engine of one configuration and returns its curves.

    tick: is called with a few words before each curve, to show progress. Raises ``ConfigError`` for
    several configurations.
    """
    if not batches or not contexts:
        raise ConfigError("--batch and --context must name at least one number each.")
    if len(engines.configs) > 1:
        raise ConfigError(
            f"the costs of one way to draft are measured at a time, and {len(engines.configs)} "
            "were given: give --speculative-config once."
        )
    facts = provenance()
    llm = engine(engines, engines.configs[0] if engines.configs else None, max(batches))
    model = llm.config.options.get("model")
    return CostReport(
        provenance={
            **facts,
            "dtype": str(llm.target.dtype).removeprefix("torch."),
            "threads": str(torch.get_num_threads()),  # as the models were loaded with
        },
        model=Path(llm.target.name).name,
        drafter=llm.config.method if model is None else f"{llm.config.method} {Path(model).name}",
        bandwidth=read_bandwidth(llm.target.device),
        curves=measure_curves(llm, batches, contexts, temperature, repeats, longest, tick),
    )


def cost_rows(curve: Curve) -> tuple[str, list[str], list[list[str]]]:
    """Returns the title, the header and the rows of a curve's table, a row per token count."""
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
