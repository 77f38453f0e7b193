"""What takes part in a benchmark, what it is asked to do, and what it hands back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.stats import Metrics


@dataclass(frozen=True)
class Job:
    """One batch of prompts, each to be continued by exactly ``max_tokens`` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Outcome:
    """The texts of a job, and what each cost where the contestant counts that."""

    texts: list[list[int]]
    metrics: Sequence[Metrics] = ()


class Contestant(ABC):
    """A way of generating text. ``run`` returns when all tokens are on the host."""

    name: str
    what: str
    """One line for the report: which program, which settings."""
    lossless: bool = True
    rule: str | None = None
    """Name of the verification rule, if it has one of ours."""
    same_text_when_sampled: bool = False
    """True where the text is a function of seed and prompt, whatever is drafted."""

    @abstractmethod
    def run(self, job: Job) -> Outcome:
        """Generates the texts of a job."""

    def refusal(self, batch: int, temperature: float) -> str | None:
        """Returns why it cannot run such jobs, None if it can."""
        return None

    @property
    def nbytes(self) -> int | None:
        """Bytes of weights and caches that it needs, where it can tell."""
        return None
