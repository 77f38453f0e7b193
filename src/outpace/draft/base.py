"""The drafter protocol and what a drafter may see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from outpace.config import COMMON
from outpace.core.law import History, LawMaker
from outpace.core.proposal import DraftingTerms, Drawn, Needs, Proposal, Verdict
from outpace.core.tree_shape import TreeShape
from outpace.errors import ConfigError, did_you_mean
from outpace.targets.cpu.kernels import Kernels
from outpace.targets.hf.load import Loaded


@dataclass(frozen=True, eq=False)
class Rows:
    """The batch as a drafter sees it at the start of a round."""

    history: History
    law: LawMaker
    seeds: Tensor  # [B]
    positions: Tensor  # [B] committed tokens
    brief: DraftingTerms = field(default_factory=DraftingTerms)
    """What the rule asks of the drafter."""
    shape: TreeShape | None = None
    """Of which the budgets are the first nodes, for a drafter that leaves it open."""

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with the noise of the target's own."""
        return self.brief.coupled

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


@dataclass(frozen=True, eq=False)
class Setup:
    """What a drafter is built from."""

    target: Loaded
    rows: int
    max_length: int
    options: Mapping[str, Any]
    """As `Drafter.read` returns them."""
    compile: bool = False
    """Play short passes compiled or recorded (`targets.fixed`)."""
    cpu_kernels: Kernels = "auto"


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
    shape: TreeShape | None = None
    """Of its trees, where that is given; None for chains."""
    any_shape: bool = False
    """Whether it drafts what `Rows.shape` says."""
    weight_bytes: int = 0
    """Of ``nbytes``, those of weights."""
    pass_bytes: int = 0
    """Of weights, those that one of its passes reads."""

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

    def rewind(self, rows: Rows) -> None:
        """Is told that the round came to nothing: it will be played again for some of its rows."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins new rows with these prompts, after the present ones."""

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows (ascending), renumbered from 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and caches that only the drafter needs."""
        return 0

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        return 0.0
