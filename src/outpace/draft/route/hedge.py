"""Learns about all drafters from every round, and drafts with the one that would have done best.

Liu et al. 2025, "Not-a-Bandit: provably no-regret drafter selection in speculative decoding for
LLMs" (HedgeSpec, arXiv 2510.20064).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.core.proposal import Proposal
from outpace.core.transfer import to_device
from outpace.core.values import is_whole, shown
from outpace.draft.base import Drafter, Round, RowInfo, Rows, Setup
from outpace.draft.options import option
from outpace.draft.remembered import Remembered
from outpace.draft.route.base import Asked
from outpace.draft.route.choosing import DraftersOptions
from outpace.draft.route.feedback import Committed
from outpace.draft.route.learning import Learning
from outpace.draft.route.state import numbers
from outpace.errors import ConfigError

ALIKE = 1.02
"""Another drafter must promise so much more than the present one: whoever takes over has to read
what it has not seen."""


class Leader:
    """Discounted gains of N drafters, of which the greatest leads.

    A drafter's gain at a committed token is what a draft that begins there would have brought,
    tokens per price: 1 + the sum over k <= horizon of the product of k chances of acceptance.
    These are known once ``horizon`` tokens are committed, whoever drafted them, for all drafters.
    With Hedge's weights exp(eta x gain) the leader is the drafter with most weight; it is taken
    without a draw, so that texts repeat.
    """

    def __init__(self, prices: Sequence[float], horizon: int, memory: float) -> None:
        """prices: of a round with each drafter; memory: kept of the gains at each token."""
        self.prices, self.horizon, self.memory = list(prices), horizon, memory
        self.gains = [0.0] * len(self.prices)
        self.best = 0

    def learn(self, chances: Sequence[Sequence[float]]) -> None:
        """Adds what drafts that begin at one token would have brought. chances: of acceptance at
        each of the ``horizon`` tokens from there on, by drafter."""
        for number, own in enumerate(chances):
            brought, product = 1.0, 1.0
            for chance in own:
                product *= chance
                brought += product
            old = self.memory * self.gains[number]
            self.gains[number] = old + (1 - self.memory) * brought / self.prices[number]
        top = max(range(len(self.gains)), key=self.gains.__getitem__)
        if self.gains[top] > ALIKE * self.gains[self.best]:
            self.best = top


@dataclass(frozen=True, kw_only=True)
class HedgeOptions(DraftersOptions):
    """What a user may set."""

    horizon: int = option(4, "Tokens of the drafts by which drafters are compared.")
    memory: float = option(0.97, "What is kept of the gains at each token; 1 / (1 - memory) count.")
    state: Any = option(None, "A file in which what is learned is kept between runs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_whole(self.horizon) and 1 <= self.horizon <= 32):
            raise ConfigError(f"horizon must be whole, 1 to 32, not {shown(self.horizon)}.")
        if not (isinstance(self.memory, (int, float)) and 0 < self.memory < 1):
            raise ConfigError(f"memory must be between 0 and 1, not {shown(self.memory)}.")


class Hedge(Learning[Leader]):
    """Drafts with the child that would have brought most lately, token for price.

    After each round every child says with which laws it would have drafted the committed tokens
    (`Drafter.laws_of`: a pass of each model that was not asked), and look-ups, which are asked in
    every round, what they found. Prices are nominal, so that a text does not depend on a clock:
    a round costs one pass of the target and ``horizon`` passes of the drafter, by the bytes of
    weights that these read. Rows of a batch have one leader; a sampled row with a seed of its own
    goes by its own history.
    """

    name: ClassVar[str] = "hedge"
    Options: ClassVar[type[Any]] = HedgeOptions

    def __init__(
        self,
        children: Sequence[Drafter],
        names: Sequence[str],
        vocabulary: int,
        options: HedgeOptions,
        target_bytes: int,
    ) -> None:
        horizon = options.horizon
        prices = [1 + horizon * child.pass_bytes / max(1, target_bytes) for child in children]

        def first() -> Leader:
            return Leader(prices, horizon, options.memory)

        super().__init__(children, names, vocabulary, first, options.state)
        self._horizon = horizon
        # By row and child, the chances at committed tokens that are not learned from yet.
        self._streams = Remembered(lambda: [deque[float]() for _ in children])

    @classmethod
    def of(cls, setup: Setup, children: Sequence[Drafter], names: Sequence[str]) -> Hedge:
        vocabulary, target = setup.loaded.vocabulary, setup.target
        return cls(children, names, vocabulary, setup.options, target.pass_bytes)

    @property
    def gains(self) -> dict[str, float]:
        """What a round of each drafter would have brought lately, in tokens per pass."""
        return dict(zip(self.names, self._learned.shared.gains, strict=True))

    def admit(self, rows: Sequence[RowInfo]) -> None:
        super().admit(rows)
        self._streams.admit(rows)

    def retain(self, rows: Sequence[int]) -> None:
        super().retain(rows)
        self._streams.retain(rows)

    def reset(self) -> None:
        super().reset()
        self._streams.retain([])

    def to_save(self) -> Mapping[str, Sequence[float]]:
        shared = self._learned.shared
        return {"gains": shared.gains, "best": [shared.best]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        shared = self._learned.shared
        shared.gains = numbers(saved, "gains", len(self.children))
        best = int(numbers(saved, "best", 1)[0])
        shared.best = min(max(0, best), len(self.children) - 1)

    def choice(self, rows: Rows) -> list[int]:
        return [self._learned.of(rows, row).best for row in range(len(rows))]

    def ask_as(
        self, number: int, chosen: Sequence[int], rows: Rows, budgets: Sequence[int]
    ) -> Asked:
        """A look-up is asked for all rows, whoever chose it: that is free and tells what it would
        have brought. What one row learns must not depend on what another one chose."""
        if self.children[number].pass_bytes:
            return super().ask_as(number, chosen, rows, budgets)
        return self.ask(number, rows, budgets)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        chosen = set(self.choice(rows))
        for number, child in enumerate(self.children):
            if number not in chosen and not child.pass_bytes:
                self.ask(number, rows, budgets)
        return super().propose(rows, budgets)

    def observe(self, rows: Rows, round: Round) -> None:
        asked: dict[int, Asked] = {each.child: each for each in self._asked}
        super().observe(rows, round)
        committed = Committed.of(rows, round)
        chances = [
            self._chances(number, asked.get(number), rows, committed)
            for number in range(len(self.children))
        ]
        for row in range(len(rows)):
            streams = self._streams[row]
            for number, stream in enumerate(streams):
                stream.extend(chances[number][row])
            leader = self._learned.of(rows, row)
            while len(streams[0]) >= self._horizon:
                leader.learn([list(stream)[: self._horizon] for stream in streams])
                for stream in streams:
                    stream.popleft()

    def _chances(
        self, number: int, asked: Asked | None, rows: Rows, committed: Committed
    ) -> list[list[float]]:
        """The chances of acceptance of one child at each committed token, by row."""
        child, laws = self.children[number], None
        all_rows = range(len(rows))
        played = [asked is not None and bool(asked.nodes[row]) for row in all_rows]
        if child.pass_bytes and not all(played):
            tokens = to_device(committed.padded(), rows.seeds.device)
            laws = child.laws_of(rows, tokens)
        found = []
        for row in all_rows:
            if asked is not None and played[row]:
                found.append(self._continued(committed.of_draft(asked, row), asked, row))
            elif laws is not None:
                found.append(committed.of_laws(laws, row))
            else:
                found.append([0.0] * len(committed.tokens[row]))
        return found

    @staticmethod
    def _continued(chances: list[float], asked: Asked, row: int) -> list[float]:
        """Nothing is known of the token behind a draft that was accepted whole: the mean of the
        others stands in."""
        length = len(asked.nodes[row])
        if length < len(chances) and all(chances[:length]):
            chances[length] = sum(chances[:length]) / length
        return chances
