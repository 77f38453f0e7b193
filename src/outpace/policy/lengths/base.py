"""The base class of length policies: a draft length for each request, and state kept by request."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from outpace.core.account import Account, Mode
from outpace.core.options import Options
from outpace.core.proposal import DraftingTerms, StoppingFn
from outpace.core.request import PerRequest, Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.base import Drafter
from outpace.draft.round import Outcome
from outpace.policy.base import Controller, RoundPlan, requested_budget
from outpace.policy.text import Tally

LONGEST = 32
"""Tokens of a draft, at most, that a policy comes to by itself."""


@dataclass
class _Record:
    """A request's rounds, and what its drafters did in them."""

    rounds: int = 0
    by_drafter: dict[str, Tally] = field(default_factory=dict)

    def enter(self, outcome: Outcome) -> None:
        self.rounds += 1
        if outcome.drafted:
            self.by_drafter.setdefault(outcome.method, Tally()).count(outcome)


class LengthPolicy(Controller):
    """A rule for how much is drafted.

    It looks at nothing but what the request's earlier rounds brought and, if it ends chains, at the
    distributions and tokens of the draft so far, so that what is drafted keeps the distribution
    that it was drawn from.
    """

    name: ClassVar[str]
    can_stop_early: ClassVar[bool] = False
    """Whether it ends chains by the drafter's distributions or states, which the drafter then must
    have."""
    default_count: ClassVar[int]
    """Tokens of a draft, or of the first one, where num_speculative_tokens is "auto"."""
    Options: ClassVar[type[Any]] = Options
    has_drafter: bool = True
    """Whether there is a drafter, so that a request may have drafts although ``count`` is 0."""

    def __init__(self, count: int, options: Any) -> None:
        """count: num_speculative_tokens."""
        self.count, self.options = count, options
        self._shape: TreeShape | None = None
        self._records = PerRequest(lambda request: _Record(), lasting=True)

    @property
    def most(self) -> int:
        """Nodes of the largest draft that it can come to."""
        return self.count

    def shaped(self, shape: TreeShape | None) -> Self:
        """Returns itself, with the tree of which its drafts are the first nodes."""
        self._shape = shape
        return self

    @abstractmethod
    def budgets(self, requests: Sequence[Request]) -> list[int]:
        """Returns how many nodes to draft for each request."""

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        """Returns the rule's terms with what ends chains, if anything does."""
        return terms

    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        return RoundPlan(self.budgets(requests), self.terms(requests, terms), self._shape)

    def check_drafter(self, drafter: Drafter) -> None:
        """Is shown the drafter; raises ``ConfigError`` where it does not go with it."""

    def record(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds | None
    ) -> None:
        for request, outcome in zip(requests, outcomes, strict=True):
            self._records[request].enter(outcome)
        self.learn_round(requests, outcomes)

    def account(self, request: Request) -> Account:
        record = self._records[request]
        if not self.has_drafter:
            return Account(Mode.NONE, record.rounds)
        mode = Mode.OFF if requested_budget(request) == 0 else Mode.FIXED
        drafters = tuple(tally.account(name) for name, tally in [*record.by_drafter.items()])
        return Account(mode, record.rounds, drafters)

    def learn_round(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Learns what became of a round's drafts."""
        for request, outcome in zip(requests, outcomes, strict=True):
            # A text that has ended was cut somewhere in its draft, and an empty draft says nothing.
            if outcome.drafted and not request.finished:
                self.learn(request, outcome)

    def learn(self, request: Request, outcome: Outcome) -> None:
        """Learns what became of one request's draft."""


class StoppingPolicy(LengthPolicy):
    """Ends a chain after a token, which stays in the draft, by the distributions and tokens so
    far."""

    can_stop_early: ClassVar[bool] = True

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        return replace(terms, make_stopping_fn=self.begin_round(requests))

    @abstractmethod
    def begin_round(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], StoppingFn]:
        """Returns what `DraftingTerms.make_stopping_fn` is in the coming round."""
