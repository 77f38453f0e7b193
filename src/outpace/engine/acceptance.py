"""How likely the next drafted tokens are to be accepted, learned from what was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR = 0.6
PRIOR_WEIGHT = 2.0
"""What a drafter is worth before anything is known of it: a guess with the weight of two tokens."""

DRAFTER_MEMORY = 0.998
REQUEST_MEMORY = 0.98
"""Kept of the counts at each new observation: some 500 rounds of all requests, 50 of one."""

SHARED_WEIGHT = 10.0
"""Weight, in tokens, of the drafter's estimate in that of a single request."""


@dataclass
class Counts:
    """Discounted counts of tested and accepted tokens at each depth (list index 0: depth 1).

    A token is tested if those before it were accepted.
    """

    memory: float
    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Adds a chain of ``drafted`` tokens of which the first ``accepted`` were accepted."""
        missing = drafted - len(self.tested)
        self.tested += [0.0] * missing
        self.accepted += [0.0] * missing
        for depth in range(min(drafted, accepted + 1)):
            self.tested[depth] = self.tested[depth] * self.memory + 1
            self.accepted[depth] = self.accepted[depth] * self.memory + (depth < accepted)

    def rate(self, depth: int, prior: float, weight: float) -> float:
        """Returns the chance of the token at list index ``depth``, shrunk towards a prior."""
        if depth >= len(self.tested):
            return prior
        return (self.accepted[depth] + prior * weight) / (self.tested[depth] + weight)

    def chances(self, depths: int) -> list[float]:
        """Returns the chance at each depth 1..depths, given that those before were accepted. A
        depth that was hardly tried takes after the one before it."""
        found: list[float] = []
        for depth in range(depths):
            found.append(self.rate(depth, found[-1] if found else PRIOR, PRIOR_WEIGHT))
        return found


class Acceptance:
    """Chances by depth of one drafter, over all requests and for each.

    A request takes after the others, moved by as much as it differs from them at lesser depths.
    """

    def __init__(self) -> None:
        self._all = Counts(DRAFTER_MEMORY)

    def new(self) -> Counts:
        """Returns the empty counts of a new request."""
        return Counts(REQUEST_MEMORY)

    def learn(self, request: Counts, drafted: int, accepted: int) -> None:
        """Adds one verified draft. A round in which nothing was drafted teaches nothing."""
        for counts in (self._all, request):
            counts.add(drafted, accepted)

    def chances(self, request: Counts, depths: int) -> list[float]:
        """Returns the chance at each depth 1..depths, given that those before were accepted."""
        own = 1.0  # relative to the estimate for all, at the depth before
        found = []
        for depth, shared in enumerate(self._all.chances(depths)):
            chance = request.rate(depth, min(1.0, shared * own), SHARED_WEIGHT)
            own = chance / shared if shared else 1.0
            found.append(chance)
        return found


def expected(chances: Sequence[float]) -> list[float]:
    """Returns the expected tokens of a round for each length 0..D of a chain, with the one that
    every round brings.

    >>> expected([0.5, 0.5])
    [1.0, 1.5, 1.75]
    """
    tokens, reach = [1.0], 1.0
    for chance in chances:
        reach *= chance
        tokens.append(tokens[-1] + reach)
    return tokens
