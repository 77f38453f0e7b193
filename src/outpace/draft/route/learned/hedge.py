"""Learns about all drafters from every round, and drafts with the one that would have done best.

Liu et al. 2025, "Not-a-Bandit: provably no-regret drafter selection in speculative decoding for
LLMs" (HedgeSpec, arXiv 2510.20064).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from outpace.core.logits.constraints import History
from outpace.core.proposal import Proposal
from outpace.core.transfer import padded
from outpace.draft.base import Drafter, Round, RowInfo, Rows, Setup
from outpace.draft.guesses import Guess
from outpace.draft.remembered import Remembered
from outpace.draft.route.base import Asked, Learned
from outpace.draft.route.feedback import Committed
from outpace.draft.route.learned.base import Learning, LearningOptions
from outpace.draft.route.learned.leader import ALIKE, AT_FIRST, Leader, Purse, Shadow
from outpace.draft.state import numbers

READ_AT_ONCE = 8
"""Tokens of a text that a model reads for the price of one pass; more take as much longer."""

EXPECTED = 128
"""Tokens that are expected of a text, or from some length on as many again as it has: what reading
it costs is shared out among them."""


@dataclass
class Heard:
    """What was heard of the drafters on one text."""

    shadows: Sequence[Shadow]
    rounds: int = 0
    tokens: int = 0
    readers: set[int] = field(default_factory=set)
    """The models that have read it, so that they need not begin with that."""


@dataclass(frozen=True, kw_only=True)
class HedgeOptions(LearningOptions):
    """What a user may set."""

    method: ClassVar[str] = "hedge"
    horizon: Annotated[int, Ge(1), Le(32)] = 4
    """Tokens of the drafts by which drafters are compared."""
    memory: Annotated[float, Gt(0), Lt(1)] = 0.97
    """What is kept of the gains at each token; 1 / (1 - memory) count."""
    every: Annotated[int, Ge(1)] = 4
    """Models that did not draft are asked in one of this many rounds at most."""
    asking: Annotated[float, Gt(0), Le(1)] = 0.01
    """The share of the price of all rounds that asking may take, reading included."""


class Hedge(Learning[Leader]):
    """Drafts with the child that would have brought most lately, token for price.

    After a round a model that did not draft says with which distributions it would have drafted the
    committed tokens (`Drafter.probs_of`, one pass); one that cannot, such as a trained head, drafts
    beside the one that was chosen. That costs something, and is done in one of ``every`` rounds
    only, and only while it takes no more than ``asking`` of what all rounds cost. Look-ups say what
    they would have found: they are asked again wherever a round of their own would have ended.

    Prices are nominal, so that a text does not depend on a clock: a round costs one pass of the
    target and ``horizon`` passes of the drafter, by the bytes of weights that these read. A model
    that has not read a text yet has that to pay, too: another child drafts where the text is not
    expected to be long enough to repay it. Rows of a batch have one leader; a sampled row with a
    seed of its own goes by its own history.
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
        shares = [child.pass_bytes / max(1, target_bytes) for child in children]
        prices = [1 + horizon * share for share in shares]

        def first() -> Leader:
            return Leader(prices, options.memory)

        super().__init__(children, names, vocabulary, first, options.state)
        self.joins_drafts |= any(
            one.pass_bytes and not one.has_probs and not one.aux_per_node for one in children
        )
        self._horizon, self._shares = horizon, shares
        self._purses = Learned(lambda: Purse(options.asking, options.asking * EXPECTED))
        self._purses.shared.at_first = AT_FIRST
        self._every = options.every
        self._texts = Remembered(lambda: Heard([Shadow(horizon) for _ in children]))
        # Of the present round, by row; empty where nothing is drafted at all.
        self._budgets: Sequence[int] = ()
        self._chosen: Sequence[int] = ()
        self._wanted: Sequence[Sequence[int]] = ()  # by child
        self._riding: set[int] = set()
        """The children that draft from columns in the target's pass, as far as that is known."""

    @classmethod
    def of(cls, setup: Setup, children: Sequence[Drafter], names: Sequence[str]) -> Hedge:
        vocabulary, target = setup.loaded.vocabulary, setup.target
        return cls(children, names, vocabulary, setup.options, target.pass_bytes)

    @property
    def gains(self) -> dict[str, float]:
        """What a round of each drafter would have brought lately, in tokens per pass."""
        return dict(zip(self.names, self._learned.shared.gains, strict=True))

    @property
    def spent(self) -> float:
        """What asking has cost so far, in passes of the target; that of seeded rows left out."""
        return self._purses.shared.spent

    def admit(self, rows: Sequence[RowInfo]) -> None:
        super().admit(rows)
        self._texts.admit(rows)
        self._purses.admit(rows)

    def retain(self, rows: Sequence[int]) -> None:
        super().retain(rows)
        self._texts.retain(rows)
        self._purses.retain(rows)

    def reset(self) -> None:
        super().reset()
        self._texts.retain([])
        self._purses.retain([])
        self._budgets = self._chosen = self._wanted = ()

    def to_save(self) -> Mapping[str, Sequence[float]]:
        shared = self._learned.shared
        return {"gains": shared.gains, "best": [shared.best]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        shared = self._learned.shared
        shared.gains = numbers(saved, "gains", len(self.children))
        best = int(numbers(saved, "best", 1)[0])
        shared.best = min(max(0, best), len(self.children) - 1)

    def choice(self, rows: Rows) -> list[int]:
        return [self._best(rows, row) for row in range(len(rows))]

    def _best(self, rows: Rows, row: int) -> int:
        """The leader, unless it has to read the text and another one costs less without that."""
        leader = self._learned.of(rows, row)
        length = max(EXPECTED, self._texts[row].tokens)
        costs = [
            1 / gain + self._price_of_reading(number, rows, row) / length
            for number, gain in enumerate(leader.gains)
        ]
        least = min(range(len(costs)), key=costs.__getitem__)
        return leader.best if costs[leader.best] <= ALIKE * costs[least] else least

    def _price_of_reading(self, number: int, rows: Rows, row: int) -> float:
        """What it costs a child to read a text that it has not read."""
        if self.children[number].keeps_up or number in self._texts[row].readers:
            return 0.0
        return self._shares[number] * rows.length(row) / READ_AT_ONCE

    def ask_as(
        self, number: int, chosen: Sequence[int], rows: Rows, budgets: Sequence[int]
    ) -> Asked:
        return self.ask(number, rows, self._wanted[number])

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        self._chosen, self._budgets = self.choice(rows), list(budgets)
        for row in range(len(rows)):
            self._purses.of(rows, row).held = 0.0
        every = range(len(self.children))
        self._wanted = [self._asked_for(number, rows, budgets) for number in every]
        for number, wanted in enumerate(self._wanted):
            if number not in self._chosen and any(wanted):
                self.ask(number, rows, wanted)
        return super().propose(rows, budgets)

    def _asked_for(self, number: int, rows: Rows, budgets: Sequence[int]) -> Sequence[int]:
        """How much a child drafts in each row, whether that is what is scored or not.

        A look-up is asked for all rows, whoever chose it: that is free and tells what it would
        have brought. What one row learns must not depend on what another one chose."""
        child = self.children[number]
        if not child.pass_bytes:
            return budgets
        wanted = [
            budget if chosen == number else 0
            for chosen, budget in zip(self._chosen, budgets, strict=True)
        ]
        if child.has_probs or child.aux_per_node:
            return wanted
        return [
            own or (min(most, self._horizon) if most and self._is_due(number, rows, row) else 0)
            for row, (own, most) in enumerate(zip(wanted, budgets, strict=True))
        ]

    def ask(self, child: int, rows: Rows, budgets: Sequence[int]) -> Asked:
        asked = super().ask(child, rows, budgets)
        if asked.proposal.aux_tokens is not None:
            self._riding.add(child)
        return asked

    def rewind(self, rows: Rows) -> None:
        super().rewind(rows)
        self._budgets = self._chosen = self._wanted = ()

    def observe(self, rows: Rows, round: Round) -> None:
        asked: dict[int, Asked] = {each.child: each for each in self._asked}
        self._budgets = self._budgets or [0] * len(rows)
        committed = Committed.of(rows, round)
        # Before the children are told of the round: what they learn from it would help them here.
        found = {
            number: self._found(number, asked.get(number), rows, committed)
            for number, child in enumerate(self.children)
            if child.asked_anywhere
        }
        super().observe(rows, round)
        chances = [
            found.get(number) or self._chances(number, asked.get(number), rows, committed)
            for number in range(len(self.children))
        ]
        for row, tokens in enumerate(committed.tokens):
            leader, text = self._learned.of(rows, row), self._texts[row]
            self._pay(asked, rows, row)
            pairs = zip(text.shadows, (each[row] for each in chances), strict=True)
            ended = [list(map(shadow.ended, own)) if own else None for shadow, own in pairs]
            leader.learn(ended, len(tokens))
            text.rounds, text.tokens = text.rounds + 1, text.tokens + len(tokens)
        self._budgets = self._chosen = self._wanted = ()

    def _pay(self, asked: Mapping[int, Asked], rows: Rows, row: int) -> None:
        """Enters what a round has cost in a row, and what it has cost to ask others for drafts.

        That waits until the round is over: one that comes to nothing is played again."""
        purse, text, price = self._purses.of(rows, row), self._texts[row], 1.0
        for number, each in asked.items():
            if not each.nodes[row] or not self.children[number].pass_bytes:
                continue
            if self._chosen[row] == number:
                price += len(each.nodes[row]) * self._shares[number]
            else:
                purse.pay(self._price_of_asking(number, rows, row))
            text.readers.add(number)
        purse.earned += price

    def _found(
        self, number: int, asked: Asked | None, rows: Rows, committed: Committed
    ) -> list[list[float]]:
        """Whether a look-up would have said each committed token, by row. A round of its own ends
        with the token that it did not foresee, after which it is asked again."""
        before, texts = rows.history_before(), committed.tokens
        every = range(len(rows))
        said: list[list[float]] = [[] for _ in every]
        known: list[Guess | None] = [
            asked.nodes[row] if asked and self._budgets[row] else None for row in every
        ]
        while True:
            for row in every:
                nodes = known[row]
                if nodes is not None and len(said[row]) < len(texts[row]):
                    path = nodes.follow(texts[row][len(said[row]) :])
                    said[row] += [1.0] * len(path)
                    said[row] += [0.0] * (len(said[row]) < len(texts[row]))
            missing = [len(said[row]) < len(texts[row]) for row in every]
            if not any(missing):
                return said
            outputs = [
                [*before.outputs[row], *texts[row][: min(len(said[row]), len(texts[row]) - 1)]]
                for row in every
            ]
            then = replace(rows, history=History(before.prompts, outputs))
            budgets = [
                (self._budgets[row] or self._horizon) if missing[row] else 0 for row in every
            ]
            known = list(self.made(number, then, budgets)[1])

    def _chances(
        self, number: int, asked: Asked | None, rows: Rows, committed: Committed
    ) -> list[list[float]]:
        """The chances of acceptance of a child at each committed token, by row; none where it was
        not asked."""
        child, probs = self.children[number], None
        all_rows = range(len(rows))
        played = [asked is not None and bool(asked.nodes[row]) for row in all_rows]
        due = [
            child.has_probs and not played[row] and self._is_due(number, rows, row)
            for row in all_rows
        ]
        if any(due):
            tokens = padded(committed.tokens, rows.seeds.device)
            probs = child.probs_of(rows, tokens, due)
        for row in (row for row in all_rows if due[row]):
            self._purses.of(rows, row).pay(self._price_of_asking(number, rows, row))
            self._texts[row].readers.add(number)
        found = []
        for row in all_rows:
            if asked is not None and played[row]:
                found.append(self._continued(committed.of_draft(asked, row), asked, row))
            elif child.pass_bytes:
                known = due[row] and probs is not None and bool(probs[row].any())
                found.append(committed.of_probs(probs, row) if probs is not None and known else [])
            else:
                silent = self._was_silent(number, rows, row)
                found.append([0.0] * len(committed.tokens[row]) if silent else [])
        return found

    def _is_due(self, number: int, rows: Rows, row: int) -> bool:
        """Whether it is time to ask a model about a row, and the row's purse holds the price ready.

        What does not draft for pure rows is not asked about them: what it would say there may be
        what it has learned from others."""
        reproducible = rows.is_reproducible(row)
        if self._texts[row].rounds % self._every or (
            reproducible and self.children[number].skips_reproducible
        ):
            return False
        return self._purses.of(rows, row).hold(self._price_of_asking(number, rows, row))

    def _price_of_asking(self, number: int, rows: Rows, row: int) -> float:
        """What it costs to ask a model: a pass, or a draft where it cannot say its
        distributions."""
        passes = 1 if self.children[number].has_probs else self._horizon
        return passes * self._shares[number] + self._price_of_reading(number, rows, row)

    def _was_silent(self, number: int, rows: Rows, row: int) -> bool:
        """Whether a child that cost no pass, and drafted nothing, was asked and had nothing to say.
        One whose columns did not ride in the round before could not say anything."""
        if not self._budgets[row]:
            return False
        # Look-ahead columns never ride in a pure row, whatever those of other rows do.
        reproducible = rows.is_reproducible(row)
        rides = self.children[number].aux_per_node or (number in self._riding and not reproducible)
        return not rides or self._chosen[row] == number

    @staticmethod
    def _continued(chances: list[float], asked: Asked, row: int) -> list[float]:
        """Nothing is known of the token after a draft that was accepted whole: the mean of the
        others stands in."""
        length = len(asked.nodes[row])
        if length < len(chances) and all(chances[:length]):
            chances[length] = sum(chances[:length]) / length
        return chances
