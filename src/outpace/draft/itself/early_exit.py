"""The target's first layers draft for the whole, for models that were trained for it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outpace.core.options import needed, option
from outpace.core.proposal import Proposal
from outpace.core.values import shown
from outpace.draft.base import Rows, Setup
from outpace.draft.itself.partial import PartialDrafter, ending_of
from outpace.errors import ConfigError
from outpace.targets.base import LowerView
from outpace.targets.hf.loading.loaded import Loaded


@dataclass(frozen=True, kw_only=True)
class EarlyExitOptions:
    """What a user may set."""

    exit_layer: Any = needed("How many of the first layers draft.")
    draft_exit: Any = option(
        None,
        "Drafting stops after a token with a lower probability than this; 'adaptive': a threshold "
        "that follows what is accepted; null: only at the budget.",
    )

    def __post_init__(self) -> None:
        ending_of(self.draft_exit)
        given = self.exit_layer
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(
                "early_exit needs 'exit_layer': how many of the first layers draft, as the model "
                f"was trained for it; not {shown(given)}."
            )


class EarlyExit(PartialDrafter):
    """Drafts with the first layers, and norm and head of the target after them.

    The target's pass goes on from where they ended, so that no layer is computed twice: their keys
    and values stay, and their hidden states travel with the proposal.
    """

    name: ClassVar[str] = "early_exit"
    Options: ClassVar[type[Any]] = EarlyExitOptions
    view: LowerView

    @classmethod
    def build(cls, setup: Setup) -> EarlyExit:
        """Raises ``ConfigError`` for a layer that the target does not have."""
        count, wanted = int(setup.loaded.config.num_hidden_layers), setup.options.exit_layer
        if wanted >= count:
            raise ConfigError(
                f"exit_layer must be below the target's {count} layers, not {wanted}."
            )
        ending = ending_of(setup.options.draft_exit)
        return cls(setup.target, setup.target.lower(wanted), ending)

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        return {"exit_layer": int(loaded.config.num_hidden_layers) - 1}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        proposal = super().propose(rows, budgets)
        return (
            replace(proposal, precomputed=self.view.precomputed) if proposal.tree.size else proposal
        )
