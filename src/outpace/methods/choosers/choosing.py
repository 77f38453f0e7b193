"""Drafters that choose one child for each row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.core.options import Options
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.methods.choosers.base import (
    ChildProposal,
    CompositeDrafter,
    check_configs,
    dummy_configs,
)
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class DraftersOptions(Options):
    """What a user may set."""

    method: ClassVar[str]
    """The method that these options are of."""
    drafters: Any
    """The drafters to choose from, each as a speculative_config."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_configs(self.method, "drafters", self.drafters, least=2)


class SelectingDrafter(CompositeDrafter):
    """Lets one child draft for each row. The choice is made before the child draws anything, so the
    drawn tokens keep their distribution."""

    @abstractmethod
    def choice(self, rows: Rows) -> list[int]:
        """Returns the number of each row's child."""

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"drafters": dummy_configs(loaded, "draft_model", "ngram")}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        round_state, chosen = self.round_state(rows), self.choice(rows)
        round_state.budgets, round_state.chosen = list(budgets), chosen
        numbers = sorted(set(chosen))
        asked = [self.ask_as(number, chosen, rows, budgets) for number in numbers]
        return self.join(asked, [numbers.index(number) for number in chosen])

    def ask_as(
        self, number: int, chosen: Sequence[int], rows: Rows, budgets: Sequence[int]
    ) -> ChildProposal:
        """Returns what a child proposes in the rows for which it was chosen. chosen: each row's
        child."""
        own = [budget if who == number else 0 for who, budget in zip(chosen, budgets, strict=True)]
        return self.ask(number, rows, own)
