"""What takes part in a benchmark, which jobs it is given, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.stats import Metrics

BASELINE = "plain"
"""Name of the contestant that all others are compared with."""


@dataclass(frozen=True)
class BatchJob:
    """One batch of prompts ``[B][...]`` of token ids, each to be continued by exactly
    ``max_tokens`` tokens.

    If the target itself ends its one text there, ``most`` is how many tokens there might have been.
    Our own engine is told of no other number: whoever knows where a text ends drafts better than
    in use. samples: texts of each prompt, which stands as often as that, side by side. tasks: of
    each prompt, if they are known.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int = 0
    most: int | None = None
    samples: int = 1
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class BatchTexts:
    """The texts of a job, and the counters of each where the contestant keeps any."""

    texts: list[list[int]]
    metrics: Sequence[Metrics] = ()


class Contestant(ABC):
    """A way of generating text. ``run`` returns when all tokens are on the host."""

    name: str
    what: str
    """One line for the report: which program, which settings."""
    lossless: bool = True
    rule: str | None = None
    """Name of the verification rule, for a contestant that is outpace itself."""
    ends_by_itself: bool = False
    """Whether it makes of a job with ``most`` as many tokens as its text has."""
    same_text_when_sampled: bool = False
    """Whether a sampled text follows from its seed and prompt alone, whatever is drafted."""

    @abstractmethod
    def run(self, job: BatchJob) -> BatchTexts:
        """Generates the texts of a job."""

    def forget_texts(self) -> None:
        """Forgets the texts that it has made, so that none of them helps when its prompt comes
        again."""

    def refusal(self, batch: int, temperature: float) -> str | None:
        """Returns why it cannot run such jobs, None if it can."""
        return None

    @property
    def nbytes(self) -> int | None:
        """Bytes of weights and caches that it needs, where it can tell."""
        return None
