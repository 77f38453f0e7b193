"""The controller protocol: it chooses what each round drafts, and learns from the outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.core.account import Account, Mode
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import MAX_TREE_NODES, TreeShape
from outpace.draft.round import DrafterChoice, LookupDraft, Outcome
from outpace.errors import ParamsError


@dataclass(frozen=True)
class RoundPlan:
    """How the coming round is drafted."""

    budgets: Sequence[int]
    """How many nodes to draft for each request, 0 to decode plainly. With several drafters to
    choose from, at most: `Controller.pick` says how many."""
    terms: DraftingTerms
    """What is asked of the drafter: the rule's terms, and where chains end if the drafter's own
    distributions decide about that."""
    shape: TreeShape | None = None
    """The tree to draft, where the drafter leaves that open: a row's budget says how many of its
    first nodes are drafted (`Rows.shape_of`)."""


class Controller(ABC):
    """Chooses what each row drafts in a round, and learns from what it brought."""

    @abstractmethod
    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        """Returns how the coming round is drafted. terms: of the rule."""

    def pick(
        self,
        requests: Sequence[Request],
        found: Mapping[str, Sequence[LookupDraft]],
        budgets: Sequence[int],
    ) -> Sequence[DrafterChoice]:
        """Returns which drafter drafts how many tokens in each row, for a drafter that stands for
        several (`Drafter.candidate_drafters`); nothing where that drafter chooses itself. found:
        what look-ups would draft (`Drafter.look_up`). budgets: the rows', from `plan`."""
        return ()

    def begin(self, request: Request, computed: Mapping[str, int]) -> None:
        """Learns of a request that joins the batch. computed: how many tokens of its text drafters
        need not read, by their names (`Drafter.computed_tokens`)."""

    def record(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds | None
    ) -> None:
        """Learns what the last round drafted, what was accepted and how long it took. seconds: None
        for a round whose time says nothing about later ones.

        The requests are as the round has left them.
        """

    @abstractmethod
    def account(self, request: Request) -> Account:
        """Returns what drafted for a request so far, and why no more was drafted."""


class FrozenController(Controller):
    """Plans as another controller does, and shows it no rounds: for the texts of a warm-up, which
    must not change how users' texts are drafted."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        return self._controller.plan(requests, terms)

    def pick(
        self,
        requests: Sequence[Request],
        found: Mapping[str, Sequence[LookupDraft]],
        budgets: Sequence[int],
    ) -> Sequence[DrafterChoice]:
        return self._controller.pick(requests, found, budgets)

    def account(self, request: Request) -> Account:
        return self._controller.account(request)


def cap_budgets(
    requests: Sequence[Request], budgets: Sequence[int], most: int = MAX_TREE_NODES
) -> list[int]:
    """Returns the budgets, each no larger than what its request may still generate and than
    ``most``, the nodes that are scored at once. A request that asks for a number of its own gets
    that instead.

    Every round brings one token without a draft, so the last token of a text is not drafted.
    """
    wanted = [
        budget if (asked := requested_budget(request)) is None else asked
        for request, budget in zip(requests, budgets, strict=True)
    ]
    pairs = zip(requests, wanted, strict=True)
    return [max(0, min(budget, request.remaining - 1, most)) for request, budget in pairs]


def requested_budget(request: Request) -> int | None:
    """Returns the budget that a request asks for itself, None if it leaves the choice to us."""
    requested = request.params.speculative
    if requested is None or requested == "auto":
        return None
    return 0 if requested == "off" else int(requested)


def mode_of(request: Request) -> Mode:
    """Returns what decides how much is drafted for a request where a controller may choose that."""
    requested = requested_budget(request)
    if requested is not None:
        return Mode.FIXED if requested else Mode.OFF
    return Mode.NOMINAL if request.reproducible else Mode.MEASURED


def check_requested_budget(request: Request, most: int) -> None:
    """Raises ``ParamsError`` where a request wants more tokens drafted than are scored at once."""
    requested = requested_budget(request) or 0
    if requested > most:
        raise ParamsError(
            f"speculative must be at most {most} with this LLM, which scores no more tokens of a "
            f"text at once, not {requested}."
        ).about("speculative")
