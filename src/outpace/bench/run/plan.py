"""What a benchmark runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

from outpace.bench.run.schedule import Pace
from outpace.errors import ConfigError


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to run. Raises ``ConfigError`` for values that cannot be run."""

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    to_end: bool = False
    """Whether a text ends where the target's own plain text does, if that is before
    ``max_tokens``: what is written behind it repeats itself, and is drafted too easily."""
    max_prompt_tokens: int = 512
    pace: Pace = field(default_factory=Pace)
    seed: int = 0
    samples: int = 1
    """Texts of each prompt, written side by side: a batch holds so many times fewer prompts."""
    sweep: tuple[int, ...] = ()
    """Draft lengths that are also run, at the first batch size and temperature, for the curve of
    speed-up by draft length."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ConfigError(f"--max-tokens must be at least 2, not {self.max_tokens}.")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError("--batch must be whole numbers from 1 on.")
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise ConfigError("--temperature must be numbers from 0 on.")
        if self.max_prompt_tokens < 1:
            raise ConfigError(
                f"--max-prompt-tokens must be at least 1, not {self.max_prompt_tokens}."
            )
        self._check_samples()
        if self.sweep and min(self.sweep) < 1:
            raise ConfigError("--sweep must be draft lengths from 1 on.")

    def _check_samples(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"--samples must be at least 1, not {self.samples}.")
        uneven = next((batch for batch in self.batches if batch % self.samples), None)
        if uneven is not None:
            raise ConfigError(
                f"a batch of {uneven} cannot hold {self.samples} texts of each prompt: give "
                f"--batch {self.samples}, or a multiple of it."
            )
        if self.samples > 1 and min(self.temperatures) == 0:
            raise ConfigError(
                "all greedy texts of a prompt are the same one: --samples needs temperatures above "
                "0."
            )

    @property
    def settings(self) -> list[tuple[int, float]]:
        """All pairs of a batch size and a temperature, each once."""
        return list(dict.fromkeys(product(self.batches, self.temperatures)))
