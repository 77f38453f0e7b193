"""How likely the next drafted tokens are to be accepted, learned from earlier rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.core.trees.tree_shape import Trail

PRIOR = 0.7
PRIOR_OF_LOOK_UPS = 0.4
PRIOR_WEIGHT = 6.0
"""The assumed chance of acceptance before anything is known of a drafter, with the weight of six
observed tokens."""

YOUNGER = 0.5
"""Before anything is known, a node's chance as a share of its elder sibling's."""

DRAFTER_MEMORY = 0.998
REQUEST_MEMORY = 0.98
"""The share of the old counts that remains at each new observation. They remember some 500 rounds
of all requests, and 50 of a single one."""

MOST_MISSES = 30.0
"""The most rounds in which asking found nothing that one round in which it did is charged for."""

SHARED_WEIGHT = 10.0
"""In the estimate for one request, the estimate over all requests weighs as many tokens."""


def prior(rank: int, eldest: float = PRIOR) -> float:
    """Returns the chance of a sibling of this rank before anything is known."""
    return eldest * YOUNGER**rank


@dataclass
class _Rank:
    """Discounted counts of siblings of one rank, by depth (list index 0: depth 1)."""

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, depth: int, accepted: bool, memory: float) -> None:
        missing = depth + 1 - len(self.tested)
        self.tested += [0.0] * missing
        self.accepted += [0.0] * missing
        self.tested[depth] = self.tested[depth] * memory + 1
        self.accepted[depth] = self.accepted[depth] * memory + accepted

    def rate(self, depth: int, guess: float, weight: float) -> float:
        if depth >= len(self.tested):
            return guess
        return (self.accepted[depth] + guess * weight) / (self.tested[depth] + weight)


@dataclass
class Counts:
    """Discounted counts of tested and accepted tokens, by depth and rank among siblings.

    A token is tested if those before it were accepted and its elder siblings were not.
    """

    memory: float
    prior: float = PRIOR
    ranks: list[_Rank] = field(default_factory=list)

    def add(self, trail: Trail) -> None:
        """Adds what became of a draft."""
        for depth, (siblings, accepted) in enumerate(trail):
            for rank in range(siblings if accepted is None else accepted + 1):
                self.rank(rank).add(depth, rank == accepted, self.memory)

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


@dataclass
class Slimness:
    """How many levels the drafts of a drafter have for each node: 1 for chains, less for trees."""

    memory: float
    nodes: float = 0.0
    levels: float = 0.0

    def add(self, nodes: int, levels: int) -> None:
        """Adds a draft."""
        self.nodes = self.nodes * self.memory + nodes
        self.levels = self.levels * self.memory + levels

    @property
    def levels_per_node(self) -> float:
        """1 before anything was drafted."""
        return self.levels / self.nodes if self.nodes else 1.0


@dataclass
class Finding:
    """How often a drafter that was asked finds anything to propose, and in how many rows."""

    memory: float
    asked: float = 1.0
    found: float = 1.0
    rows_asked: float = 1.0  # in rounds with a find
    rows_found: float = 1.0

    def add(self, found: int, asked: int) -> None:
        """Adds a round in which it was asked for n rows, and found something for some."""
        self.asked = self.asked * self.memory + 1
        self.found = self.found * self.memory + (found > 0)
        if found:
            self.rows_asked = self.rows_asked * self.memory + asked
            self.rows_found = self.rows_found * self.memory + found

    @property
    def share(self) -> float:
        """The share of the rows for which it finds something, in rounds where it finds anything."""
        return self.rows_found / self.rows_asked

    @property
    def misses_per_find(self) -> float:
        """0 before the first miss."""
        return min(MOST_MISSES, self.asked / max(self.found, 1e-9) - 1)


class Acceptance:
    """Chances by depth and rank of one drafter, over all requests and for each.

    A request is expected to be like the others, corrected by how much it differed from them at
    lesser depths.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        """prior: the chance of a first token before anything is known."""
        self._prior = prior
        self._all = Counts(DRAFTER_MEMORY, prior)

    @property
    def tried(self) -> bool:
        """Whether any draft was verified."""
        return self._all.tried

    def new(self) -> Counts:
        """Returns the empty counts of a new request."""
        return Counts(REQUEST_MEMORY, self._prior)

    def learn(self, request: Counts, trail: Trail) -> None:
        """Adds one verified draft. A round in which nothing was drafted teaches nothing."""
        for counts in (self._all, request):
            counts.add(trail)

    def typical(self, depths: int, siblings: int = 1) -> list[list[float]]:
        """Returns the chances over all requests, as `Counts.chances` does."""
        return self._all.chances(depths, siblings)

    def chances(self, request: Counts, depths: int, siblings: int = 1) -> list[list[float]]:
        """Returns the chances of one request, as `Counts.chances` does."""
        found: list[list[float]] = [[] for _ in range(depths)]
        shared = self.typical(depths, siblings)
        for rank in range(siblings):
            counts, own = request.rank(rank), 1.0  # relative to all, at the depth before
            for depth in range(depths):
                guess = shared[depth][rank]
                chance = counts.rate(depth, min(1.0, guess * own), SHARED_WEIGHT)
                own = chance / guess if guess else 1.0
                found[depth].append(chance)
        return found
