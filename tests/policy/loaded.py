"""A pretended machine that other processes use, too: its speed jumps for seconds at a time, single
rounds are held up, and drafting suffers more than scoring does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import DraftingTerms
from outpace.core.stats import Seconds
from outpace.draft.round import Outcome
from outpace.engine.request import EngineRequest
from outpace.policy.base import Controller, cap_budgets


@dataclass(frozen=True)
class State:
    """What the other processes make of the machine: how many times longer the parts take."""

    score: float = 1.0
    draft: float = 1.0


@dataclass(frozen=True)
class Machine:
    """Rounds on a machine whose state changes.

    states: those between which it jumps. stay: seconds that it stays in one, on average. plain,
    level, node: seconds of a plain round, and of what a drafted level and a scored node add.
    held_up: the share of rounds that another process interrupts, for a time with a heavy tail.
    """

    states: Sequence[State]
    stay: float = 3.0
    plain: float = 0.010
    level: float = 0.0015
    node: float = 0.0005
    held_up: float = 0.05
    tail: float = 1.3

    def jumps(self, seconds: float, seed: int) -> list[tuple[float, State]]:
        """Returns when which state begins."""
        dice, now, found = random.Random(seed), 0.0, []
        at = seed
        while now < seconds:
            found.append((now, self.states[at % len(self.states)]))
            at += 1
            now += dice.expovariate(1 / self.stay)
        return found

    def took(self, state: State, width: int, dice: random.Random) -> Seconds:
        """Returns what a round takes."""
        score = (self.plain + self.node * width) * state.score * dice.uniform(0.95, 1.05)
        draft = self.level * width * state.draft * dice.uniform(0.9, 1.1)
        if dice.random() < self.held_up * (1 + draft / score):
            late = self.plain * min(50.0, dice.paretovariate(self.tail))
            if dice.random() < draft / (draft + score):
                draft += late
            else:
                score += late
        return Seconds(draft, score, 0.0)


def tokens_written(
    controller: Controller,
    machine: Machine,
    chance: float,
    seconds: float = 120.0,
    seed: int = 0,
    finds: float = 1.0,
    watch: Callable[[float, int], None] | None = None,
) -> int:
    """Returns the tokens that are written in n seconds. finds: the share of rounds in which
    the drafter finds anything to propose."""
    jumps = machine.jumps(seconds, seed)
    dice, luck, now, at, tokens = random.Random(seed), random.Random(seed + 1), 0.0, 0, 0
    params = SamplingParams(temperature=0).resolve({})
    row = EngineRequest([1] * 8, RowOptions(params), seed=0, max_tokens=10**6)
    while now < seconds:
        while at + 1 < len(jumps) and jumps[at + 1][0] <= now:
            at += 1
        if row.remaining < 100 or len(row.output_ids) > 400:
            row = EngineRequest([1] * 8, RowOptions(params), seed=0, max_tokens=10**6)
        (width,) = cap_budgets([row], controller.plan([row], DraftingTerms()).budgets)
        if luck.random() >= finds:
            width = 0
        taken = machine.took(jumps[at][1], width, dice)
        accepted = next((n for n in range(width) if luck.random() >= chance), width)
        row.extend([2] * (accepted + 1))
        now += taken.total
        tokens += accepted + 1
        if watch:
            watch(now, width)
        controller.record([row], [Outcome(width, width, accepted, accepted + 1)], taken)
    return tokens
