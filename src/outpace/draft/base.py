"""The drafter protocol and what a drafter may see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.config import COMMON
from outpace.core.law import Branches, History, LawMaker
from outpace.core.proposal import Needs, Proposal, Verdict
from outpace.core.rng import Role, inverse_cdf, uniform
from outpace.errors import ConfigError, did_you_mean
from outpace.models.load import Loaded
from outpace.verify.base import Drawn
from outpace.verify.coupled import realise


@dataclass(frozen=True, eq=False)
class Rows:
    """The batch as a drafter sees it at the start of a round."""

    history: History
    law: LawMaker
    seeds: Tensor  # [B]
    positions: Tensor  # [B] committed tokens
    coupled: bool = False
    """Draw with the noise that the target's own token at that position is drawn with."""

    def __len__(self) -> int:
        return len(self.history.outputs)

    def since(self, row: int, start: int) -> list[int]:
        """Returns the committed tokens of a row, prompt then output, from ``start`` on."""
        prompt, output = self.history.prompts[row], self.history.outputs[row]
        if start >= len(prompt):
            return list(output[start - len(prompt) :])
        return [*prompt[start:], *output]

    def length(self, row: int) -> int:
        """Returns how many tokens of a row are committed."""
        return len(self.history.prompts[row]) + len(self.history.outputs[row])


class Picker:
    """Draws the drafted tokens of one round from their laws, as the rows' options ask.

    Greedy and coupled rows' tokens are given once the law is (`Point`); all others are sampled.
    """

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows = rows
        self._valid = torch.ones(
            len(rows), 1, count, dtype=torch.bool, device=rows.seeds.device
        )  # [B, 1, K]
        self.sampled = not (rows.coupled or rows.law.all_greedy)
        if self.sampled:
            self._u = uniform(rows.seeds, rows.positions, Role.DRAFT, count)

    def __call__(self, logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the next token of a chain ``[B]`` and, if it was sampled, its law ``[B, V]``.

        logits: ``[B, V']`` after the tokens ``drafted`` so far, ``[B, i]``.
        """
        rows, step = self._rows, drafted.shape[1]
        branches = Branches(drafted[:, None], self._valid[..., :step])
        if rows.law.all_greedy:
            return rows.law.best(logits[:, None], branches, rows.history)[:, 0], None
        q = rows.law(logits[:, None], branches, rows.history)
        if rows.coupled:
            return realise(q, rows.seeds, rows.positions[:, None] + step)[:, 0], None
        return inverse_cdf(q[:, 0], self._u[:, step]), q[:, 0]


@dataclass(frozen=True, eq=False)
class Setup:
    """What a drafter is built from."""

    target: Loaded
    rows: int
    max_length: int
    options: Mapping[str, Any]
    """As `Drafter.read` returns them."""


class Drafter(ABC):
    """Proposes tokens; learns of the outcome through `observe` and of nothing else.

    Rows are numbered 0..B-1 as in the engine's batch: ``admit`` appends rows, ``retain`` keeps some
    of them, renumbered.
    """

    name: ClassVar[str]
    draws: frozenset[Drawn]
    """How its tokens may be drawn: what a rule must be able to take."""
    trees: ClassVar[bool] = False
    default_rule: ClassVar[str] = "token"
    """The rule that is used when none is named."""
    options: ClassVar[Mapping[str, Any]] = {}
    """The entries of ``speculative_config`` that only this drafter knows, with their defaults."""
    needs: Needs = Needs()
    levels: Sequence[int] | None = None
    """Nodes at each depth of a tree of fixed shape; None for chains."""
    weight_bytes: int = 0
    """Of ``nbytes``, those of weights."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options filled up with defaults; ``ConfigError`` for an unknown one."""
        for name in given:
            if name not in cls.options:
                known = [*cls.options, *COMMON]
                raise ConfigError(
                    f"unknown key {name!r} in speculative_config for method {cls.name!r}"
                    f"{did_you_mean(name, known)}."
                )
        return {**cls.options, **given}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raises for options, as `read` returns them, that are wrong whatever the target is: called
        before anything is loaded."""

    @classmethod
    @abstractmethod
    def build(cls, setup: Setup) -> Drafter:
        """Returns the drafter for a target."""

    @abstractmethod
    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        """Returns at most ``budgets[b]`` nodes for each row."""

    def observe(self, rows: Rows, proposal: Proposal, verdict: Verdict) -> None:
        """Is told the verdict on its proposal; ``rows`` are as they were when it was made."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins new rows with these prompts, after the present ones."""

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), renumbered from 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and caches that only the drafter needs."""
        return 0
