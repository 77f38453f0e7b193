"""The results of a benchmark, as frozen dataclasses that are written as JSON and read again."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outpace.bench.divergence import Divergence
from outpace.bench.statistics import AcceptanceCounts, Identity, Interval, Split
from outpace.core.account import Account
from outpace.errors import ConfigError

SCHEMA = 1
"""Number of the JSON format; it is raised when a field changes its meaning."""


@dataclass(frozen=True)
class TaskResult:
    """What one contestant did on the prompts of one task."""

    task: str
    speedup: Interval | None
    tokens_per_second: float
    acceptance: AcceptanceCounts | None


@dataclass(frozen=True)
class Prediction:
    """The decode speed-up that follows from the times of a round's parts, and the
    measured one."""

    predicted: float
    measured: float
    alpha: float
    """Probability of accepting a drafted token, if acceptances are independent."""
    draft_seconds: tuple[tuple[int, float], ...]
    verify_seconds: tuple[tuple[int, float], ...]

    @property
    def reached(self) -> float:
        """Measured / predicted: what is missing to 1 is the engine's own overhead."""
        return self.measured / self.predicted


@dataclass(frozen=True)
class Roof:
    """The speed at which reading weights and caches alone would take all the time."""

    tokens_per_second: float
    fraction: float
    """Measured tokens per second / ``tokens_per_second``."""


@dataclass(frozen=True)
class MethodResult:
    """One contestant at one batch size and temperature. Speed-ups are over the baseline, on the
    same prompts."""

    name: str
    what: str
    rule: str | None
    lossless: bool
    tokens_per_second: float
    """All tokens of all prompts / all seconds, the prompts' own passes included."""
    decode_tokens_per_second: float | None
    """Without the first token of each text and what came before it."""
    speedup: Interval | None
    decode_speedup: Interval | None
    speedup_by_job: tuple[float, ...] = ()
    """The speed-up of each prompt, or of each batch of prompts, in their order; () for the
    baseline."""
    tasks: tuple[TaskResult, ...] = ()
    acceptance: AcceptanceCounts | None = None
    split: Split | None = None
    identity: Identity | None = None
    divergence: Divergence | None = None
    peak_bytes: int | None = None
    own_bytes: int | None = None
    over_peers: Mapping[str, Interval] = field(default_factory=dict)
    """For outpace's own methods: speed-up over each other program, on the same prompts."""
    prediction: Prediction | None = None
    roof: Roof | None = None
    account: Account | None = None
    """What it drafted with in all texts together, and why not with more; None of plain decoding and
    of other programs."""

    @property
    def drafted_nothing(self) -> bool:
        """Whether it could have drafted and has not: then it has no speed-up of its own."""
        return self.rule is not None and self.acceptance is None


@dataclass(frozen=True)
class SweepPoint:
    """Decode speed-ups with one draft length ``k``."""

    k: int
    speedup: Interval
    """Measured."""
    predicted: float | None
    """From the times of the parts and the measured tokens per round; None where the times of a
    draft depend on who drafts."""
    theory: float | None
    """The same, as if acceptances were independent."""


@dataclass(frozen=True)
class Sweep:
    """Decode speed-up by draft length, of one method with one acceptance rate ``alpha``."""

    method: str
    alpha: float
    points: tuple[SweepPoint, ...]


NEAR_TIES = "near-ties"
OWN_ROUNDING = "another program, which rounds in its own way"
UNEXPLAINED = "NOT explained by rounding"
"""Why texts differ from the baseline's."""


@dataclass(frozen=True)
class SettingResult:
    """All contestants at one batch size and temperature."""

    batch: int
    temperature: float
    prompts: int
    prompt_tokens: float
    """Mean length of the prompts."""
    max_tokens: int
    methods: tuple[MethodResult, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why a contestant did not take part, by its name."""
    left_over: int = 0
    """Prompts that were not run, since they do not fill a batch."""
    stopped_of: int | None = None
    """The prompts that there were to be, where Ctrl-C came before all was done: before all of them
    were run, or before their repeats or what is measured afterwards."""
    sweep: Sweep | None = None
    to_end: bool = False
    """Whether texts ended where the target ended them, if that was before ``max_tokens``."""
    samples: int = 1
    """Texts of each prompt, written side by side."""

    @property
    def peers(self) -> frozenset[str]:
        """The names of the other programs that took part."""
        return frozenset(name for method in self.methods for name in method.over_peers)

    def cause_of(self, method: MethodResult) -> str | None:
        """Returns why texts of a method differ from the baseline's, in words; None where none
        does."""
        found = method.identity
        if found is None or not found.differences:
            return None
        if found.explained:
            return NEAR_TIES
        # Another program may round weights, activations and its cache otherwise.
        return OWN_ROUNDING if method.name in self.peers else UNEXPLAINED

    @property
    def texts(self) -> str:
        """How many prompts there were, and texts of each, in words."""
        each = f", {self.samples} texts of each" if self.samples > 1 else ""
        stopped = "" if self.stopped_of is None else f" (stopped, of {self.stopped_of})"
        if self.prompts == self.stopped_of:
            stopped = " (stopped after them)"
        return f"{self.prompts} prompts{stopped}{each}"

    @property
    def tokens(self) -> str:
        """How many tokens each text has, in words."""
        if self.to_end:
            return f"at most {self.max_tokens} new tokens each, to the end of the text"
        return f"{self.max_tokens} new tokens each"


@dataclass(frozen=True)
class Report:
    """A whole run."""

    provenance: Mapping[str, str]
    baseline: str
    bandwidth: float | None
    """Bytes per second, measured."""
    cells: tuple[SettingResult, ...]
    """One for each batch size and temperature."""
    schema: int = SCHEMA

    def check(self) -> None:
        """Raises ``ConfigError`` if a lossy rule has no measured divergence: such a report cannot
        be written."""
        for cell in self.cells:
            for method in cell.methods:
                if not method.lossless and method.divergence is None:
                    raise unmeasured(method.rule, cell.batch, cell.temperature)

    def to_json(self) -> str:
        """Returns the report as JSON text; raises as `check` does."""
        self.check()
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Returns the report that `to_json` wrote."""
        try:
            found = json.loads(text)
            if found["schema"] != SCHEMA:
                raise ConfigError(
                    f"this report has schema {found['schema']} and this outpace reads {SCHEMA}."
                )
            report: Report = restored(cls, found)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"this is no report of outpace bench ({error}).") from error
        return report


def unmeasured(rule: str | None, batch: int, temperature: float) -> ConfigError:
    """Returns the error for a lossy rule whose divergence is unknown: its speed is not reported."""
    return ConfigError(
        f"verify={rule!r} is lossy and its divergence could not be measured at batch {batch}, "
        f"temperature {temperature:g}: its speed is not reported."
    )


def restored(kind: Any, value: Any) -> Any:
    """Returns a value of ``kind`` (a dataclass, a tuple, a mapping, a union, an enum or a plain
    type) from what JSON made of it. Unknown fields raise ``KeyError``, what is no object where a
    dataclass is wanted ``TypeError``."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise TypeError(f"{kind.__name__} cannot be made of {value!r}")
        hints = typing.get_type_hints(kind)
        unknown = set(value) - {f.name for f in dataclasses.fields(kind)}
        if unknown:
            raise KeyError(f"unknown field {sorted(unknown)[0]!r}")
        return kind(**{name: restored(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return restored(next(a for a in arguments if a is not type(None)), value)
    if origin is tuple:
        inner = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(restored(a, item) for a, item in zip(inner, value, strict=True))
    if isinstance(value, Mapping):
        values = arguments[1] if arguments else Any
        return {name: restored(values, item) for name, item in value.items()}
    return value
