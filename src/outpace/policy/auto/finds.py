"""How often what a look-up is sure of is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outpace.core.request import Request
from outpace.core.trees.tree_shape import Trail
from outpace.policy.auto.acceptance import DRAFTER_MEMORY
from outpace.policy.calibration import Calibration, ranges_of


class Finds:
    """What a look-up found in the present round, and what it is worth by how sure that look-up is
    of it. A long match is nearly always right, and one of a single token seldom: on average over
    both, neither would be drafted as it should."""

    def __init__(self) -> None:
        self._calibration = Calibration(memory=DRAFTER_MEMORY)
        self._sure: Mapping[Request, Sequence[float]] = {}

    def show(self, sure: Mapping[Request, Sequence[float]]) -> None:
        """Is shown what was found in this round: how sure the look-up is of each token; nothing for
        a row of which it does not say that."""
        self._sure = {request: each for request, each in sure.items() if each}

    def chances(self, request: Request) -> list[float] | None:
        """Returns the chance of each token that was found for a row to be accepted after those
        before it; None if the look-up does not say how sure it is."""
        if request not in self._sure:
            return None
        chances = self._calibration.chances()
        return [chances[at] for at in ranges_of(self._sure[request])]

    def learn(self, sure: Sequence[float], trail: Trail) -> None:
        """Learns what became of a find, or what would have become of it."""
        accepted = sum(rank is not None for _, rank in trail)
        tested = ranges_of(sure[: len(trail)])
        self._calibration = self._calibration.with_draft(tested, accepted)
