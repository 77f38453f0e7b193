"""Acceptance rates of drafted tokens, learned from earlier rounds: by depth and rank among
siblings, and by the drafter's confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.core.proposal import StoppingFn
from outpace.core.request import Request
from outpace.core.trees.tree_shape import AcceptedRanks
from outpace.draft.exits import probability

PRIOR, PRIOR_OF_LOOK_UPS = 0.7, 0.4
"""The chance of acceptance that is assumed before anything is known of a drafter. Most guesses of
look-ups are by chance."""

PRIOR_WEIGHT = 8.0
"""What is believed beforehand weighs as many observed tokens: of a drafter's first tokens, of a
range of confidence, and of one text what holds over all of them. With 6 replays are .998 times as
fast, with 10 .997."""

COUNT_DECAY = 0.998
"""The share of the old counts that remains at each new observation: they remember some 500. With 50
of a single text replays are the same."""


@dataclass
class Ratio:
    """A share in which older observations count less: ``part`` of ``whole``."""

    prior: float = 0.0
    """The weight of a share of 1 that is assumed beforehand."""
    part: float = 0.0
    whole: float = 0.0

    def add(self, part: float, whole: float) -> None:
        """Adds one observation."""
        self.part = self.part * COUNT_DECAY + part
        self.whole = self.whole * COUNT_DECAY + whole

    @property
    def value(self) -> float:
        """The share; 1 before the first observation."""
        whole = self.whole + self.prior
        return (self.part + self.prior) / whole if whole else 1.0


# -- by depth and rank -----------------------------------------------------------------------------


def prior(rank: int, eldest: float = PRIOR) -> float:
    """Returns the chance of a sibling of this rank before anything is known: half its elder's."""
    return eldest * 0.5**rank


@dataclass
class _Rank:
    """Discounted counts of siblings of one rank, by depth (list index 0: depth 1)."""

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, depth: int, accepted: bool) -> None:
        missing = depth + 1 - len(self.tested)
        self.tested += [0.0] * missing
        self.accepted += [0.0] * missing
        self.tested[depth] = self.tested[depth] * COUNT_DECAY + 1
        self.accepted[depth] = self.accepted[depth] * COUNT_DECAY + accepted

    def rate(self, depth: int, guess: float, weight: float) -> float:
        if depth >= len(self.tested):
            return guess
        return (self.accepted[depth] + guess * weight) / (self.tested[depth] + weight)


@dataclass
class Counts:
    """Discounted counts of tested and accepted tokens, by depth and rank among siblings.

    A token is tested if those before it were accepted and its elder siblings were not.
    """

    prior: float = PRIOR
    ranks: list[_Rank] = field(default_factory=list)

    def add(self, ranks: AcceptedRanks) -> None:
        """Adds what became of a draft."""
        for depth, (siblings, accepted) in enumerate(ranks):
            for rank in range(siblings if accepted is None else accepted + 1):
                self.rank(rank).add(depth, rank == accepted)

    @property
    def tried(self) -> bool:
        """Whether any token was tested."""
        return bool(self.ranks and self.ranks[0].tested)

    def rank(self, rank: int) -> _Rank:
        """The counts of siblings of this rank."""
        while rank >= len(self.ranks):
            self.ranks.append(_Rank())
        return self.ranks[rank]

    def chances(self, depths: int, siblings: int = 1) -> list[list[float]]:
        """Returns the chance at each depth 1..depths for each rank, given that it is tested. A
        depth that was hardly tried is estimated from the one before it."""
        found: list[list[float]] = [[] for _ in range(depths)]
        for rank in range(siblings):
            counts, guess = self.rank(rank), prior(rank, self.prior)
            for depth in range(depths):
                guess = counts.rate(depth, guess, PRIOR_WEIGHT)
                found[depth].append(guess)
        return found


class Acceptance:
    """Chances by depth and rank of one drafter, over all texts and for each.

    A text's chance at a depth is that of all texts, times how much the text differed from them at
    the depth before, until the text's own counts say otherwise.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        """prior: the chance of a first token before anything is known."""
        self._prior = prior
        self._all = Counts(prior)
        self._typical: dict[tuple[int, int], list[list[float]]] = {}  # until more is learned

    @property
    def tried(self) -> bool:
        """Whether any draft was verified."""
        return self._all.tried

    def new(self) -> Counts:
        """Returns the empty counts of a new text."""
        return Counts(self._prior)

    def learn(self, text: Counts, ranks: AcceptedRanks) -> None:
        """Adds one verified draft. A round in which nothing was drafted teaches nothing."""
        for counts in (self._all, text):
            counts.add(ranks)
        self._typical.clear()

    def typical(self, depths: int, siblings: int = 1) -> list[list[float]]:
        """Returns the chances over all texts, as `Counts.chances` does."""
        asked = depths, siblings
        known = self._typical.get(asked)  # another thread may clear them meanwhile
        if known is None:
            known = self._typical[asked] = self._all.chances(depths, siblings)
        return known

    def chances(self, text: Counts, depths: int, siblings: int = 1) -> list[list[float]]:
        """Returns the chances in one text, as `Counts.chances` does."""
        found: list[list[float]] = [[] for _ in range(depths)]
        shared = self.typical(depths, siblings)
        for rank in range(siblings):
            counts, own = text.rank(rank), 1.0  # relative to all, at the depth before
            for depth in range(depths):
                guess = shared[depth][rank]
                chance = counts.rate(depth, min(1.0, guess * own), PRIOR_WEIGHT)
                own = chance / guess if guess else 1.0
                found[depth].append(chance)
        return found


# -- by confidence ---------------------------------------------------------------------------------

BINS = 10
"""Ranges of confidence of which each has a chance of acceptance. With 14 or 20 drafts are the same
to .01 (docs/decisions/0014-chains-end-where-a-token-no-longer-pays.md)."""


@dataclass(frozen=True)
class Calibration:
    """How many tokens of each range of confidence were tested, and how many accepted.

    The confidence in a token is its probability in the drafter's distribution, or what a look-up
    says.
    """

    tested: tuple[float, ...] = (0.0,) * BINS
    accepted: tuple[float, ...] = (0.0,) * BINS
    memory: float = 1.0
    """The share of a range's counts that remains at each new token of that range."""

    def chances(self) -> list[float]:
        """Returns the chance that a token of each range is accepted; before any was tested, half
        way between its confidence and certainty."""
        believed = [(1 + (at + 0.5) / BINS) / 2 for at in range(BINS)]
        return [
            (accepted + PRIOR_WEIGHT * guess) / (tested + PRIOR_WEIGHT)
            for tested, accepted, guess in zip(self.tested, self.accepted, believed, strict=True)
        ]

    def with_draft(self, ranges: Sequence[int], accepted: int) -> Calibration:
        """Returns the counts with one draft more, of which the first ``accepted`` passed. What
        comes after the first rejection was not tested."""
        tested, passed = list(self.tested), list(self.accepted)
        for place, each in enumerate(ranges[: accepted + 1]):
            tested[each] = tested[each] * self.memory + 1
            passed[each] = passed[each] * self.memory + (place < accepted)
        return replace(self, tested=tuple(tested), accepted=tuple(passed))


def ranges_of(sure: Sequence[float]) -> list[int]:
    """Returns the range that each of these falls into, from 0 to 1.

    >>> ranges_of([0.0, 0.25, 1.0])
    [0, 2, 9]
    """
    return [min(BINS - 1, int(one * BINS)) for one in sure]


class Confidences:
    """The confidence in each token of one round's chains.

    >>> row = object()
    >>> of_round = Confidences([row])
    >>> ends = of_round.watch([3], [Calibration().chances()], lambda chance: chance < 0.8)
    >>> distribution = torch.tensor([[0.25, 0.75]])
    >>> ends(distribution, torch.tensor([1])), ends(distribution, torch.tensor([0]))
    (tensor([False]), tensor([True]))
    >>> of_round.ranges(row, 2)
    [7, 2]
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._rows = {request: row for row, request in enumerate(requests)}
        self._drawn: list[list[Tensor]] = [[] for _ in requests]
        """For each row, a list that its drafter fills in this round. It has a tensor [B] for each
        drafted token: the range of confidence that the token of each row falls into."""
        self._counts = [0] * len(requests)

    def watch(
        self,
        counts: Sequence[int],
        chances: Sequence[Sequence[float]],
        ends: Callable[[Tensor], Tensor],
    ) -> StoppingFn:
        """Returns what ends one drafter's chains, as `DraftingTerms.make_stopping_fn` does.

        counts: tokens that each row may have at most. chances: of acceptance, by row and range.
        ends: takes for each token in order the chances ``[B]`` that all tokens of the chains so far
        are accepted, returns which chains end, ``[B]`` bool.
        """
        joint_acceptance: Tensor | None = None
        drawn: list[Tensor] = []
        tables: list[Tensor] = []  # of the chances, [B, BINS], once it is known where
        for row, count in enumerate(counts):
            if count:
                self._drawn[row], self._counts[row] = drawn, count

        def stopping_fn(distribution: Tensor, token: Tensor) -> Tensor:
            nonlocal joint_acceptance
            within = (probability(distribution, token) * BINS).long().clamp(0, BINS - 1)  # [B]
            drawn.append(within)
            if not tables:
                device = distribution.device
                tables.append(torch.tensor(chances, dtype=torch.float64, device=device))
            chance = tables[0].gather(1, within[:, None])[:, 0]
            joint_acceptance = chance if joint_acceptance is None else joint_acceptance * chance
            return ends(joint_acceptance)

        return stopping_fn

    def ranges(self, request: Request, depth: int) -> list[int] | None:
        """Returns the range of each of the first ``depth`` tokens of a row's chain; None for a
        row whose chain was not watched.

        The longest chain's last token is never looked at, so no chain's last token counts: what is
        learned of a row must not depend on the other rows.
        """
        row = self._rows.get(request)
        if row is None or not self._drawn[row]:
            return None
        looked_at = min(depth, self._counts[row] - 1)
        return [int(each[row]) for each in self._drawn[row][:looked_at]]
