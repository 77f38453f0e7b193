"""The costs of drafting and scoring on this machine, and the speed-ups that they allow:
``outpace bench cost``, from the options of the command line to measured curves and a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outpace.bench.meter import Meter
from outpace.bench.provenance import provenance
from outpace.bench.results import restored
from outpace.bench.roofline import read_bandwidth
from outpace.bench.session import Engines, engine
from outpace.bench.theory import Times, best_k_from_times, ceiling, speedup_from_times
from outpace.core.progress import silent
from outpace.errors import ConfigError
from outpace.llm import LLM

ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
SCORED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17)
DRAFTED = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Best:
    """The best draft length at one acceptance rate."""

    alpha: float
    k: int
    speedup: float


@dataclass(frozen=True)
class Curve:
    """Measured seconds at one batch size and context, and what follows from them."""

    batch: int
    context: int
    """Cached tokens per row."""
    draft: tuple[tuple[int, float], ...]
    """Pairs of drafted tokens per row and seconds."""
    verify: tuple[tuple[int, float], ...]
    """Pairs of scored tokens per row and seconds."""
    best: tuple[Best, ...]
    ceiling_k: int
    ceiling: float
    """Speed-up of a drafter that is always right, with drafts of ``ceiling_k`` tokens: no drafter
    of this cost can exceed it."""

    @property
    def times(self) -> Times:
        """The curve as the theory takes it."""
        return Times(dict(self.draft), dict(self.verify))


@dataclass(frozen=True)
class CostReport:
    """All curves of one engine."""

    provenance: Mapping[str, str]
    model: str
    drafter: str
    bandwidth: float
    """Bytes per second."""
    curves: tuple[Curve, ...]

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostReport:
        """Returns the report that `to_json` wrote; ``ConfigError`` for any other text."""
        try:
            report: CostReport = restored(cls, json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no report of outpace bench cost ({error}).") from error
        return report


def measure_curves(
    llm: LLM,
    batches: Sequence[int],
    contexts: Sequence[int],
    temperature: float = 0.0,
    repeats: int = 7,
    longest: int = 16,
    tick: Callable[[str], None] = silent,
) -> tuple[Curve, ...]:
    """Returns a curve for each batch size and context, each point the median of ``repeats``.

    longest: the longest draft to measure. tick: is called with a few words before each curve.
    """
    if longest < 1 or repeats < 1 or min(batches) < 1 or min(contexts) < 2:
        raise ConfigError("--longest, --repeats and --batch must be at least 1, --context 2.")
    if max(contexts) + longest + repeats + 2 > llm.max_model_len:
        raise ConfigError(
            f"a context of {max(contexts)} leaves no room for drafts in the model's "
            f"{llm.max_model_len}: give shorter ones with --context."
        )
    found = []
    for batch in batches:
        for context in contexts:
            tick(f"batch {batch}, context {context}")
            found.append(_curve(Meter(llm, batch, context, temperature), repeats, longest))
    return tuple(found)


def _curve(meter: Meter, repeats: int, longest: int) -> Curve:
    drafts = [] if meter.llm.config.method == "none" else [k for k in DRAFTED if k <= longest]
    scored = [n for n in SCORED if n <= longest + 1]
    # Twice half of the samples: if the machine drifts, all points feel it alike.
    for part in (repeats - repeats // 2, repeats // 2):
        if part:
            meter.sample(drafts, scored, part)
    return curve_of(meter.batch, meter.context, meter.times)


def curve_of(batch: int, context: int, times: Times) -> Curve:
    """Returns the curve of these times, with the best draft lengths that follow from them."""
    best = []
    for alpha in ALPHAS:
        k = best_k_from_times(alpha, times)
        best.append(Best(alpha, k, speedup_from_times(alpha, k, times)))
    k, gain = ceiling(times)
    return Curve(
        batch=batch,
        context=context,
        draft=tuple(sorted(times.draft.items())),
        verify=tuple(sorted(times.verify.items())),
        best=tuple(best),
        ceiling_k=k,
        ceiling=gain,
    )


# -- the command -------------------------------------------------------------------------------


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
