"""The method "ctc": the texts that a `Ctc` head's frames spell are tried as a tree.

Wen et al. 2024, arXiv 2412.00061.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from outpace.core.options import option
from outpace.core.proposal import Drawn, Proposal
from outpace.core.values import is_whole, shown
from outpace.draft.base import Rows
from outpace.draft.guesses import Guess, deterministic_trees
from outpace.errors import ConfigError
from outpace.heads.base import Head
from outpace.heads.steps.ctc import Ctc
from outpace.heads.steps.spelling import TOP_K, Frame, Text, beginnings, frames_of, spelt
from outpace.methods.heads.base import HeadOptions
from outpace.methods.heads.steps import StateDrafter
from outpace.targets.base import Target


@dataclass(frozen=True, kw_only=True)
class CtcOptions(HeadOptions):
    """What a user may set."""

    top_k: int = option(TOP_K, "Tokens of each frame that are looked at.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_whole(self.top_k) and 1 <= self.top_k <= 64):
            raise ConfigError(
                f"top_k must be a whole number from 1 to 64, not {shown(self.top_k)}."
            )


class CtcDrafter(StateDrafter):
    """Drafts the likeliest beginnings of what the frames spell, as many as the budget allows.

    How likely a text is is the sum over all frames that spell it. Tokens were selected after that
    was known, so that they are points: several frames collapse to the same text, and a token does
    not follow any distribution of its own.
    """

    name: ClassVar[str] = "ctc"
    draws: frozenset[Drawn] = frozenset({Drawn.DETERMINISTIC})
    default_rule: ClassVar[str] = "match"
    Options: ClassVar[type[Any]] = CtcOptions

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(Ctc, self._head)
        self._top_k = 1

    def take(self, options: CtcOptions) -> None:
        self._top_k = min(options.top_k, len(self._vocabulary))

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        live = [budget if self.knows(row) else 0 for row, budget in enumerate(budgets)]
        if not any(live):
            return Proposal.empty(len(rows), rows.seeds.device)
        frames = self._frames(rows)
        guesses = [
            _tree(beginnings(spelt(frames[row]), budget)) if budget else Guess()
            for row, budget in enumerate(live)
        ]
        return deterministic_trees(guesses, rows.seeds.device)

    @torch.inference_mode()
    def _frames(self, rows: Rows) -> list[list[Frame]]:
        """The frames of each row: one transfer from the device."""
        logits = self.head.guess(*self.starts(rows), self._target)[:, 0]  # [B, F, V' + 1]
        known = len(self._vocabulary)  # the rest is padding
        logits = torch.cat([logits[..., :-1][..., :known], logits[..., -1:]], -1)
        return frames_of(logits, self.head.d2t, self._top_k)


def _tree(texts: Mapping[Text, float]) -> Guess:
    """The tree of these texts. All beginnings of a text come before it."""
    number: dict[Text, int] = {(): 0}
    guess = Guess()
    for text, chance in texts.items():
        number[text] = guess.add(text[-1], number[text[:-1]], chance)
    return guess
