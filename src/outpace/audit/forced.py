"""A finished text against one plain forward of itself: would each token have been chosen there?

Two texts that agree, with and without speculation, may both be wrong. So each text without
speculation is read by the model in one forward, with the prompt in front of it (teacher forcing),
and at every position the token that stands there must be the one that the forward chooses, or as
good as that up to rounding. The text must also end where its options say, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from outpace.audit.choice import Choice
from outpace.audit.listed.contract import Ending
from outpace.core.logits_pipeline import RowFault
from outpace.outputs import CompletionOutput
from outpace.targets.base import Target


@dataclass(frozen=True)
class Deviation:
    """A token that the plain forward of its text would not have chosen, or a wrong end."""

    mode: str
    prompt: int
    position: int
    token: int | None
    """None where the text ends and should go on."""
    best: int | None
    """What the forward chooses; None where nothing may be chosen."""
    gap: float
    """By how much the best token is better than the other."""
    tolerance: float
    reason: str = ""
    """What is wrong with the end of the text, where that is it."""

    @property
    def bug(self) -> bool:
        """Whether rounding cannot explain it."""
        return not self.gap <= self.tolerance

    @property
    def verdict(self) -> str:
        """The finding in words."""
        if self.reason:
            return f"BUG: {self.reason}"
        if self.bug:
            return f"BUG: gap {self.gap:.2g} above tolerance {self.tolerance:.2g}"
        return f"near-tie (gap {self.gap:.2g} below tolerance {self.tolerance:.2g})"


def deviations(
    target: Target, choice: Choice, ending: Ending, number: int, output: CompletionOutput
) -> Iterator[Deviation]:
    """Yields what is wrong with the text that plain decoding made of a prompt, if anything is.

    number: the prompt's, for the report.
    """
    tokens, mode = output.token_ids, "coupled" if choice.coupled else "greedy"
    logits = target.plain([*choice.prompt, *tokens], last=len(tokens) + 1).double()
    for at, token in enumerate(tokens):
        try:
            best = choice.best(logits[at], tokens[:at])
        except RowFault as fault:
            reason = f"goes on where its options leave no token: {fault}"
            yield Deviation(mode, number, at, token, None, math.inf, 0.0, reason)
            return
        if best != token:
            gap = choice.gap(logits[at], tokens[:at], best, token)
            yield Deviation(mode, number, at, token, best, gap, choice.allowance)
    if output.finish_reason != "error":
        for breach in ending.breaches(output):
            yield Deviation(mode, number, len(tokens), None, None, math.inf, 0.0, breach)
        return
    try:
        best = choice.best(logits[-1], tokens)
    except RowFault:
        return  # no token is left: rightly an error
    reason = f"ends with an error where plain decoding goes on: {output.error}"
    yield Deviation(mode, number, len(tokens), None, best, math.inf, 0.0, reason)
