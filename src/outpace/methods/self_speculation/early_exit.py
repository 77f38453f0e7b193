"""The target's first layers draft for the whole, for models that were trained for it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from outpace.core.proposal import Proposal
from outpace.draft.base import Rows, Setup
from outpace.errors import ConfigError
from outpace.methods.self_speculation.partial import (
    PartialDrafter,
    PartialOptions,
    parse_draft_exit,
)
from outpace.targets.base import EarlyExitView
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class EarlyExitOptions(PartialOptions):
    """What a user may set."""

    exit_layer: Annotated[int, Ge(1)]
    """How many of the first layers draft, as the model was trained for it."""


class EarlyExit(PartialDrafter):
    """Drafts with the first layers, and norm and head of the target after them.

    The target's pass goes on from where they ended, so that no layer is computed twice: their keys
    and values stay, and their hidden states travel with the proposal.
    """

    name: ClassVar[str] = "early_exit"
    Options: ClassVar[type[Any]] = EarlyExitOptions
    view: EarlyExitView

    @classmethod
    def build(cls, setup: Setup) -> EarlyExit:
        """Raises ``ConfigError`` for a layer that the target does not have."""
        count, wanted = int(setup.loaded.config.num_hidden_layers), setup.options.exit_layer
        if wanted >= count:
            raise ConfigError(
                f"exit_layer must be below the target's {count} layers, not {wanted}."
            )
        ending = parse_draft_exit(setup.options.draft_exit)
        return cls(setup.target, setup.target.early_exit(wanted), ending)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"exit_layer": int(loaded.config.num_hidden_layers) - 1}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        proposal = super().propose(rows, budgets)
        return (
            replace(proposal, precomputed=self.view.precomputed) if proposal.tree.size else proposal
        )
