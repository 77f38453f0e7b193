"""What some rules ask for beyond (p, proposal), and how they get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RuleNeeds:
    """What a rule asks of the round, declared once. Most rules ask for nothing."""

    states: tuple[int, ...] = ()
    """The layers whose hidden states are wanted at every node, numbered as in transformers: 0 is
    the embedding, -1 what the output matrix reads."""
    second_pass: str | None = None
    """Score the draft a second time: context, draft, this text, the draft again."""
    soft: bool = False
    """The distributions of greedy rows before the argmax too. Without them such a rule uses p."""
    draft_probs: bool = False
    """The drafter's distributions before any argmax, even where its tokens are points. A drafter
    without distributions (prompt look-up) has none to give, and then q is 1 at the token."""
    keeps_drafting: Callable[[Tensor], Tensor] | None = None
    """Whether a chain goes on, from its next distribution alone: see `DraftingTerms`. Chains
    only."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """One round's answer to `RuleNeeds`; fields that nobody asked for stay ``None``."""

    states: Tensor | None = None  # [B, M, H], the layers side by side, in the order asked for
    second: Tensor | None = (
        None  # [B, M, V], the target's distributions at the nodes of the second copy
    )
    soft: Tensor | None = None  # [B, M, V]
    draft: Tensor | None = None  # [B, N, V]

    def missing(self, needs: RuleNeeds) -> str | None:
        """Returns the name of a field that the rule cannot do without and that is not here."""
        if needs.states and self.states is None:
            return "states"
        return "second" if needs.second_pass is not None and self.second is None else None
