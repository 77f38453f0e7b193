"""What chooses how much is drafted, and what it learns of each round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.core.account import Account, Mode
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import LARGEST, TreeShape
from outpace.draft.base import Find as Find
from outpace.draft.base import Outcome as Outcome
from outpace.draft.base import Pick as Pick
from outpace.errors import ParamsError


@dataclass(frozen=True)
class RoundPlan:
    """How the coming round is drafted."""

    budgets: Sequence[int]
    """How many nodes to draft for each request, 0 to decode plainly."""
    terms: DraftingTerms
    """What is asked of the drafter: the rule's terms, and where chains end if the drafter's own
    distributions decide about that."""
    shape: TreeShape | None = None
    """The tree to draft, where the drafter leaves that open: a row's budget says how many of its
    first nodes are drafted."""


class Controller(ABC):
    """Chooses what each row drafts in a round, and learns from what it brought."""

    @abstractmethod
    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        """Returns how the coming round is drafted. terms: of the rule."""

    def pick(
        self,
        requests: Sequence[Request],
        found: Mapping[str, Sequence[Find]],
        budgets: Sequence[int],
    ) -> Sequence[Pick]:
        """Returns who drafts how much in each row, for a drafter with `choices`; nothing where it
        is left to the drafter. found: what look-ups would draft (`Drafter.look`). budgets: of the
        rows, as they were planned."""
        return ()

    def begin(self, request: Request, known: Mapping[str, int]) -> None:
        """Learns of a request that joins the batch. known: how many tokens of its text drafters
        need not read, by their names (`Drafter.known`)."""

    def record(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds | None
    ) -> None:
        """Learns what the last round drafted, what came of it and what it took; no seconds if
        that says nothing about the next one.

        The requests are as the round has left them.
        """

    @abstractmethod
    def account(self, request: Request) -> Account:
        """Returns what a request was drafted with so far, and why not with more."""


class Untaught(Controller):
    """Chooses as another controller does, which learns nothing of the rounds: for texts that are
    nobody's."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        return self._controller.plan(requests, terms)

    def pick(
        self,
        requests: Sequence[Request],
        found: Mapping[str, Sequence[Find]],
        budgets: Sequence[int],
    ) -> Sequence[Pick]:
        return self._controller.pick(requests, found, budgets)

    def account(self, request: Request) -> Account:
        return self._controller.account(request)


def affordable(
    requests: Sequence[Request], budgets: Sequence[int], most: int = LARGEST
) -> list[int]:
    """Returns the budgets under each request's own wish, what it may still generate, and what is
    scored at once, ``most``.

    One token comes with every round, so that the last one need not be drafted.
    """
    wishes = [wish(request) for request in requests]
    return [
        max(0, min(budget if wished is None else wished, request.remaining - 1, most))
        for request, budget, wished in zip(requests, budgets, wishes, strict=True)
    ]


def wish(request: Request) -> int | None:
    """Returns the budget that a request asks for itself, None if it leaves the choice to us."""
    wished = request.params.speculative
    if wished is None or wished == "auto":
        return None
    return 0 if wished == "off" else int(wished)


def mode_of(request: Request) -> Mode:
    """Returns what decides how much is drafted for a request where a controller may choose that."""
    wished = wish(request)
    if wished is not None:
        return Mode.FIXED if wished else Mode.OFF
    return Mode.NOMINAL if request.reproducible else Mode.MEASURED


def check_wish(request: Request, most: int) -> None:
    """Raises ``ParamsError`` where a request wants more tokens drafted than are scored at once."""
    wished = wish(request) or 0
    if wished > most:
        raise ParamsError(
            f"speculative must be at most {most} with this LLM, which scores no more tokens of a "
            f"text at once, not {wished}."
        )
