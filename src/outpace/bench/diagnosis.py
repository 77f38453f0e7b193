"""The findings of ``outpace doctor``, as frozen dataclasses that are written as JSON, and the
sentences that say why drafts pay or do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outpace.bench.statistics import Interval
from outpace.bench.theory import Payoff
from outpace.targets.describe import ComputedPart

SCHEMA = 1
"""Number of the JSON format; it is raised when a field changes its meaning."""

RARE = 0.1
"""Share of the rounds with a draft below which a look-up found next to nothing."""

Verdict = Literal["gain", "unclear", "no gain"]
"""Whether text is written faster with drafts: the whole interval lies above 1, its mean does, or
not even that."""


@dataclass(frozen=True)
class MachineFacts:
    """The machine, and what it does in a second."""

    processor: str
    instructions: str
    """The strongest instruction set: "AMX", "AVX-512", "AVX2", "NEON", ..."""
    level: str | None
    """The strongest kind of x86-64 with kernels of its own that it has: "x86-64-v4-vnni"; None for
    other processors."""
    features: tuple[str, ...]
    """Its instructions for products of small numbers, as Linux names them."""
    processors: int
    """How many this process may use."""
    threads: int
    """How many threads passes use; the figures below are of these together."""
    load: str
    """Processes that wanted to run in the minute before, on average."""
    gpu: str
    bandwidth: float
    """Bytes of memory that are read in a second."""
    multiply_adds: float | None
    """Multiply-adds of one thread in a second, in passes over the most columns that were timed: a
    lower bound, where memory limits these, too. Of a GPU, those of all of it."""

    @property
    def load_of_each(self) -> float | None:
        """The load for each processor; None where the system does not say."""
        try:
            return float(self.load) / self.processors
        except ValueError:
            return None


@dataclass(frozen=True)
class PassCost:
    """What a pass of the target over some columns costs."""

    columns: int
    seconds: float
    over_one: float
    """Over the pass of one column."""
    of_memory_bound: float | None
    """The time in which its bytes are read at the measured bandwidth, over its time."""
    roofline: float | None
    """As ``over_one``, by the model of this machine that the passes over the fewest and the most
    columns make (`outpace.bench.machines`)."""


@dataclass(frozen=True)
class DraftCost:
    """What a draft of some tokens costs, for each token."""

    tokens: int
    seconds: float
    of_a_pass: float
    """Over the target's pass of one column."""
    of_memory_bound: float | None


@dataclass(frozen=True)
class KindResult:
    """What one drafter would bring on one kind of prompts."""

    kind: str
    prompts: int
    rounds: int
    with_draft: int
    """Rounds in which something was drafted."""
    acceptance_by_depth: tuple[float, ...]
    length: int
    """Tokens of the drafts that bring most, at most; 0 where nothing is drafted."""
    tokens_per_pass: float
    acceptance: float
    """Accepted over drafted tokens."""
    cost: float
    """What a drafted token takes, in passes of one column."""
    affordable: float
    """What it may take at most to pay at this acceptance."""
    needed: float | None
    """The acceptance from which these drafts pay at this cost; None where nothing is drafted."""
    speedup: Interval
    """Over plain decoding, with drafts of that length, over prompts."""
    roofline: float | None
    """The same by measured drafts and the passes that `roofline` of `PassCost` is of; None for
    trees."""
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class DrafterResult:
    """What one drafter costs and brings."""

    name: str
    method: str
    model: str | None
    described: str | None
    """How its model is computed, in a line; None for look-ups and heads."""
    costs: tuple[DraftCost, ...]
    round_seconds: float
    """What a round with it takes more than its draft and its pass alone; below 0 where these were
    timed in a slower moment."""
    reading_seconds: float | None
    """What it takes to read a prompt before its first draft: a draft model only."""
    kinds: tuple[KindResult, ...]
    speedup: Interval
    """Over all prompts; 1 for those of kinds that it brings nothing for, where it drafts
    nothing."""
    elsewhere: Mapping[str, float]
    """By other machines, what is predicted for them, the mean of all kinds of prompts; nothing for
    trees, and for weights that are not in blocks."""


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    provenance: Mapping[str, str]
    model: str
    """How the target is computed, in a line."""
    slow: str | None
    """Why it is slower than it could be, and what helps."""
    parts: tuple[ComputedPart, ...]
    machine: MachineFacts
    context: int
    """Cached tokens in the passes that were timed."""
    passes: tuple[PassCost, ...]
    plain_seconds: float
    """A round of plain decoding in real texts, all included."""
    max_tokens: int
    """Tokens of a text at most."""
    chat: bool
    """Whether prompts were given through the chat template."""
    drafters: tuple[DrafterResult, ...]
    best: str | None
    """The drafter with a model that is worth naming; None where none surely is."""
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Returns the object that ``--json`` shows."""
        return dataclasses.asdict(self)


def verdict(speedup: float, interval: Interval) -> Verdict:
    """Returns what an interval over prompts shows. speedup: of all their rounds together."""
    if speedup <= 1 or interval.mean <= 1:
        return "no gain"
    return "gain" if interval.low is not None and interval.low > 1 else "unclear"


def why(found: Payoff, rounds: int, with_draft: int, has_model: bool, means: Verdict) -> str:
    """Returns the reason of a verdict in a sentence without a full stop. has_model: whether a model
    drafts, not a look-up."""
    if not with_draft:
        return f"nothing was found to draft in {rounds} rounds"
    found_it = f"{found.acceptance:.2f} of the drafted tokens are accepted"
    if has_model:
        found_it = f"a drafted token costs {found.cost:.2f} of a pass, and {found_it}"
    elif with_draft < RARE * rounds:
        found_it = f"something was found in {with_draft} of {rounds} rounds only, and {found_it}"
    if means != "no gain":
        unsure = "" if means == "gain" else "; prompts differ too much to be sure"
        return f"{found_it}, which makes {found.tokens:.2f} tokens a pass{unsure}"
    if found.speedup > 1:  # of the rounds together, but not of the prompts one by one
        return f"{found_it}: it gains on some prompts what it loses on others"
    return f"{found_it}: this cannot pay, {_missing(found, has_model)}"


def _missing(found: Payoff, has_model: bool) -> str:
    """What would have to be otherwise for drafts to pay."""
    if found.affordable <= 0:
        return (
            f"since scoring them makes a pass {found.scoring:.2f} times as long for "
            f"{found.tokens:.2f} tokens, whatever drafting costs"
        )
    accepted = f"an acceptance above {_share(found.needed)}"
    if not has_model:
        return f"it needs {accepted}"
    return f"it needs a cost below {found.affordable:.2f}" + (
        f", or {accepted}"
        if _share(found.needed) < "1"
        else "; at this cost no acceptance is enough"
    )


def _share(value: float) -> str:
    """A share that is rounded up, so that what is there never seems to be enough.

    >>> _share(0.601)
    '0.61'
    """
    return f"{math.ceil(100 * value - 1e-9) / 100:.2f}"
