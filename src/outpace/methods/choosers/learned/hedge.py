"""Learns about all drafters in every round, and drafts with the one that would have done best.

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
from outpace.core.request import PerRequest, Request
from outpace.core.transfer import padded
from outpace.draft.base import Round, Rows, Setup
from outpace.draft.state import numbers
from outpace.draft.token_trees import TokenTree
from outpace.methods.choosers.base import ChildProposal, Children, CompositeRound
from outpace.methods.choosers.feedback import Committed
from outpace.methods.choosers.learned.base import LearningOptions, LearningSelector
from outpace.methods.choosers.learned.hedge_state import (
    ALIKE,
    AT_FIRST,
    Allowance,
    HedgeState,
    Shadow,
)

READ_AT_ONCE = 8
"""Tokens of a text that a model reads for the cost of one pass."""

EXPECTED = 128
"""Tokens that a text is expected to have still, or as many as it has so far if those are more. The
cost of reading it is spread over them."""


@dataclass
class TextRecord:
    """What is known of the drafters on one text."""

    shadows: Sequence[Shadow]
    rounds: int = 0
    tokens: int = 0
    readers: set[int] = field(default_factory=set)
    """The models that have read it."""


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
    """The share of the cost of all rounds that asking may take, reading included."""


class Hedge(LearningSelector[HedgeState]):
    """Drafts with the child that would have brought most lately, in tokens per cost.

    After a round, a model that did not draft gives the distributions from which it would have
    drafted the committed tokens (`Drafter.probs_of`, one pass). One that cannot, such as a trained
    head, drafts as well, and its draft is not scored. This is done in one of ``every`` rounds, and
    only while it costs no more than the share ``asking`` of all rounds. Look-ups are free: they are
    asked again wherever a round of their own would have ended.

    Costs are nominal, so that a text does not depend on a clock: a round costs one pass of the
    target and ``horizon`` passes of the drafter, by the bytes of weights that these read. A model
    that has not read a text has to do so first: another child drafts where the text is probably too
    short to repay that. Rows of a batch have one leader; a reproducible row has its own.
    """

    name: ClassVar[str] = "hedge"
    Options: ClassVar[type[Any]] = HedgeOptions

    def __init__(self, given: Children, options: HedgeOptions, target_bytes: int) -> None:
        horizon, children = options.horizon, given.drafters
        shares = [child.pass_bytes / max(1, target_bytes) for child in children]
        costs = [1 + horizon * share for share in shares]

        def first() -> HedgeState:
            return HedgeState(costs, options.memory)

        super().__init__(given, first, options.state)
        joins = any(
            one.pass_bytes and not (one.capabilities.has_probs or one.aux_per_node)
            for one in children
        )
        joins = joins or self.capabilities.joins_drafts
        self.capabilities = replace(self.capabilities, joins_drafts=joins)
        self._horizon, self._shares = horizon, shares
        self._allowance = Allowance(options.asking, AT_FIRST)  # of all rows together
        self._allowances = PerRequest(
            lambda request: Allowance(options.asking, options.asking * EXPECTED),
            lasting=True,
            common=self._allowance,
        )
        self._every = options.every
        self._texts = PerRequest(
            lambda request: TextRecord([Shadow(horizon) for _ in children]), lasting=True
        )
        self._riding: set[int] = set()
        """The children known to draft from auxiliary tokens in the target's pass."""

    @classmethod
    def of(cls, setup: Setup, given: Children) -> Hedge:
        return cls(given, setup.options, setup.target.pass_bytes)

    @property
    def gains(self) -> dict[str, float]:
        """What a round of each drafter would have brought lately, in tokens per pass."""
        return dict(zip(self.names, self.learned.gains, strict=True))

    @property
    def spent(self) -> float:
        """What asking has cost so far, in passes of the target, without reproducible rows."""
        return self._allowance.spent

    def to_save(self) -> Mapping[str, Sequence[float]]:
        shared = self.learned
        return {"gains": shared.gains, "best": [shared.best]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        shared = self.learned
        shared.gains = numbers(saved, "gains", len(self.children))
        best = int(numbers(saved, "best", 1)[0])
        shared.best = min(max(0, best), len(self.children) - 1)

    def choice(self, rows: Rows) -> list[int]:
        return [self._best(request, rows.lengths[row]) for row, request in enumerate(rows.requests)]

    def _best(self, request: Request, length: int) -> int:
        """The leader, unless it has to read the text first and another child costs less then.
        length: of the text."""
        leader = self._learned[request]
        expected = max(EXPECTED, self._texts[request].tokens)
        costs = [
            1 / gain + self._cost_of_reading(number, request, length) / expected
            for number, gain in enumerate(leader.gains)
        ]
        least = min(range(len(costs)), key=costs.__getitem__)
        return leader.best if costs[leader.best] <= ALIKE * costs[least] else least

    def _cost_of_reading(self, number: int, request: Request, length: int) -> float:
        """What it costs a child to read a text of this length that it has not read."""
        can = self.children[number].capabilities
        if can.needs_no_prefill or number in self._texts[request].readers:
            return 0.0
        return self._shares[number] * length / READ_AT_ONCE

    def ask_as(
        self, number: int, chosen: Sequence[int], rows: Rows, budgets: Sequence[int]
    ) -> ChildProposal:
        return self.ask(number, rows, self.round_state(rows).wanted[number])

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        for request in rows.requests:
            self._allowances[request].held = 0.0
        round_state, chosen, every = (
            self.round_state(rows),
            self.choice(rows),
            range(len(self.children)),
        )
        round_state.wanted = [self._asked_for(number, chosen, rows, budgets) for number in every]
        for number, wanted in enumerate(round_state.wanted):
            if number not in chosen and any(wanted):
                self.ask(number, rows, wanted)
        return super().propose(rows, budgets)

    def _asked_for(
        self, number: int, chosen: Sequence[int], rows: Rows, budgets: Sequence[int]
    ) -> Sequence[int]:
        """How much a child drafts in each row, whether or not that is scored.

        A look-up is asked for all rows: that is free, and tells what it would have brought. What
        one row learns must not depend on the choice for another one."""
        child = self.children[number]
        if not child.pass_bytes:
            return budgets
        wanted = [
            budget if who == number else 0 for who, budget in zip(chosen, budgets, strict=True)
        ]
        if child.capabilities.has_probs or child.aux_per_node:
            return wanted
        return [
            own or (min(most, self._horizon) if most and self._is_due(number, rows, row) else 0)
            for row, (own, most) in enumerate(zip(wanted, budgets, strict=True))
        ]

    def ask(self, child: int, rows: Rows, budgets: Sequence[int]) -> ChildProposal:
        asked = super().ask(child, rows, budgets)
        if asked.proposal.aux_tokens is not None:
            self._riding.add(child)
        return asked

    def observe(self, round: Round) -> None:
        round_state, rows, committed = self.round_state(round.rows), round.rows, Committed.of(round)
        round_state.budgets = round_state.budgets or [0] * len(rows)
        # This comes before the children observe the round, from which they would know the tokens.
        found = {
            number: self._found(number, round_state, rows, committed)
            for number, child in enumerate(self.children)
            if child.capabilities.stateless
        }
        super().observe(round)
        if not self.learns:
            return
        chances = [
            found.get(number) or self._chances(number, round_state, rows, committed)
            for number in range(len(self.children))
        ]
        for row, (request, tokens) in enumerate(zip(rows.requests, committed.tokens, strict=True)):
            leader, text = self._learned[request], self._texts[request]
            self._pay(round_state, rows, row)
            pairs = zip(text.shadows, (each[row] for each in chances), strict=True)
            ended = [list(map(shadow.ended, own)) if own else None for shadow, own in pairs]
            leader.learn(ended, len(tokens))
            text.rounds, text.tokens = text.rounds + 1, text.tokens + len(tokens)

    def _pay(self, round_state: CompositeRound, rows: Rows, row: int) -> None:
        """Enters what a round has cost in a row, drafts of children that were only asked included.

        That waits until the round is over, because a round that fails is run again."""
        request, cost = rows.requests[row], 1.0
        allowance, text = self._allowances[request], self._texts[request]
        for each in round_state.asked:
            number = each.child
            if not each.nodes[row] or not self.children[number].pass_bytes:
                continue
            if round_state.chosen[row] == number:
                cost += len(each.nodes[row]) * self._shares[number]
            else:
                allowance.pay(self._cost_of_asking(number, rows, row))
            text.readers.add(number)
        allowance.earned += cost

    def _found(
        self, number: int, round_state: CompositeRound, rows: Rows, committed: Committed
    ) -> list[list[float]]:
        """By row, whether a look-up would have drafted each committed token. A round of its own
        ends with the first token that it would not have; then it is asked again."""
        before, texts, asked = rows.history_before(), committed.tokens, round_state.of(number)
        every = range(len(rows))
        said: list[list[float]] = [[] for _ in every]
        known: list[TokenTree | None] = [
            asked.nodes[row] if asked and round_state.budgets[row] else None for row in every
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
                (round_state.budgets[row] or self._horizon) if missing[row] else 0 for row in every
            ]
            known = list(self.propose_child(number, then, budgets)[1])

    def _chances(
        self, number: int, round_state: CompositeRound, rows: Rows, committed: Committed
    ) -> list[list[float]]:
        """By row, a child's chances of acceptance at each committed token; none where it was not
        asked."""
        child, asked, probs = self.children[number], round_state.of(number), None
        all_rows = range(len(rows))
        played = [asked is not None and bool(asked.nodes[row]) for row in all_rows]
        due = [
            child.capabilities.has_probs and not played[row] and self._is_due(number, rows, row)
            for row in all_rows
        ]
        if any(due):
            tokens = padded(committed.tokens, rows.seeds.device)
            probs = child.probs_of(rows, tokens, due)
        for row in (row for row in all_rows if due[row]):
            request = rows.requests[row]
            self._allowances[request].pay(self._cost_of_asking(number, rows, row))
            self._texts[request].readers.add(number)
        found = []
        for row in all_rows:
            if asked is not None and played[row]:
                found.append(self._continued(committed.of_draft(asked, row), asked, row))
            elif child.pass_bytes:
                known = due[row] and probs is not None and bool(probs[row].any())
                found.append(committed.of_probs(probs, row) if probs is not None and known else [])
            else:
                silent = self._was_silent(number, round_state, rows, row)
                found.append([0.0] * len(committed.tokens[row]) if silent else [])
        return found

    def _is_due(self, number: int, rows: Rows, row: int) -> bool:
        """Whether it is time to ask a model about a row, and the row's allowance suffices.

        A child that does not draft for reproducible rows is not asked about them either: its answer
        might depend on other texts."""
        request = rows.requests[row]
        skips = request.reproducible and self.children[number].capabilities.skips_reproducible
        if self._texts[request].rounds % self._every or skips:
            return False
        return self._allowances[request].hold(self._cost_of_asking(number, rows, row))

    def _cost_of_asking(self, number: int, rows: Rows, row: int) -> float:
        """What it costs to ask a model: a pass, or a draft if it cannot give its
        distributions."""
        passes = 1 if self.children[number].capabilities.has_probs else self._horizon
        reading = self._cost_of_reading(number, rows.requests[row], rows.lengths[row])
        return passes * self._shares[number] + reading

    def _was_silent(self, number: int, round_state: CompositeRound, rows: Rows, row: int) -> bool:
        """Whether a child without passes of its own was asked and found nothing. A child whose
        auxiliary tokens were not in the target's last pass could not find anything."""
        if not round_state.budgets[row]:
            return False
        # Auxiliary tokens are never in the pass of a reproducible row.
        reproducible = rows.is_reproducible(row)
        rides = self.children[number].aux_per_node or (number in self._riding and not reproducible)
        return not rides or round_state.chosen[row] == number

    @staticmethod
    def _continued(chances: list[float], asked: ChildProposal, row: int) -> list[float]:
        """The chances of a draft's tokens. After a draft that was accepted whole, the mean of its
        chances stands for that of one more token."""
        length = len(asked.nodes[row])
        if length < len(chances) and all(chances[:length]):
            chances[length] = sum(chances[:length]) / length
        return chances
