"""Which of several drafters drafts in each row, and how much."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.core.account import Account, Mode
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import Trail, chain_trail
from outpace.draft.base import Find, Pick
from outpace.draft.state import StateFile
from outpace.policy.auto.controller import CLOSE, Auto, Prospects
from outpace.policy.auto.outlook import Offer
from outpace.policy.auto.repaying import Prospect
from outpace.policy.auto.trials import LOOK_ASIDE
from outpace.policy.base import Controller, Outcome, RoundPlan, wish
from outpace.policy.ends import Ends
from outpace.policy.likeness import Likeness, Text
from outpace.policy.savings import Choice, Savings, Way

Found = Mapping[str, Sequence[Find]]
"""What each look-up would draft, by name and row."""

FoundInRow = Mapping[str, Find]
"""What look-ups found in one row, by name."""


@dataclass
class _Plan:
    """What might be drafted in the coming round, and what it promises."""

    picks: dict[Request, Pick]
    offers: dict[str, Offer]  # of those that draft, by name
    rate: float | None  # tokens per second of all rows; None while it is not known
    seconds: float | None = None  # of the round; None while they are not known


class Routing(Controller):
    """Chooses among plain decoding, look-ups and a draft model by what each brings per second.

    Look-ups cost nothing to ask, so that what they found is known when the choice is made. What
    they would have brought is known, too, whoever drafts: the committed tokens are compared with
    what they found. A draft model is tried as `Auto` tries drafts, and only its own rounds tell
    what it brings. Of rows whose text must repeat itself (`Request.reproducible`) each chooses by
    its own history and at nominal costs.
    """

    def __init__(
        self,
        autos: Mapping[str, Auto],
        free: Sequence[str],
        skip_reproducible: Collection[str] = (),
        file: StateFile | None = None,
    ) -> None:
        """autos: what is known of each drafter, by name; free: the look-ups among them;
        skip_reproducible: those that draft nothing for a row whose text must repeat itself; file:
        where what is learned is kept between runs."""
        self._autos = dict(autos)
        self._free = [name for name in autos if name in free]
        self._models = [name for name in autos if name not in free]
        self._for_reproducible = [name for name in self._models if name not in skip_reproducible]
        self._found: list[tuple[Request, FoundInRow, int]] = []
        self._since_second = 0
        self._likeness, self._ends = Likeness(), Ends()
        self._savings = {name: Savings() for name in self._models}
        self._choices: dict[str, dict[Request, Choice]] = {name: {} for name in self._models}
        self._file = file
        if file is not None:
            saved = file.load()
            if saved is not None:
                with file.read():
                    self.restore(saved)
            file.keep(self.to_save)

    def __getitem__(self, name: str) -> Auto:
        """Returns what is known of one drafter."""
        return self._autos[name]

    # -- choosing ------------------------------------------------------------------------------

    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        self._found = []
        shape = None
        for name in self._models:
            shaped = self._autos[name].prepare(requests)
            shape = shape if shaped is None else shaped
            terms = self._autos[name].terms(requests, terms)
        most = max(auto.most for auto in self._autos.values())
        wishes = [wish(request) for request in requests]
        # How much is drafted is settled when it is known what look-ups have found (`pick`).
        budgets = [most if wished is None else wished for wished in wishes]
        return RoundPlan(budgets, terms, shape)

    def pick(self, requests: Sequence[Request], found: Found, budgets: Sequence[int]) -> list[Pick]:
        drafts = {
            request: {name: found[name][row] for name in self._free if found[name][row].tokens}
            for row, request in enumerate(requests)
        }
        self._found = [(request, drafts[request], request.length) for request in requests]
        for name in self._free:
            finds = ((request, found.get(name)) for request, found in drafts.items())
            self._autos[name].finds.show({request: find.sure for request, find in finds if find})
        picks: dict[Request, Pick] = {}
        free = []
        for request, budget in zip(requests, budgets, strict=True):
            for name in self._free if budget else ():
                self._autos[name].note_find(request, name in drafts[request])
            if not budget:
                picks[request] = Pick()
            elif wish(request) is not None:
                picks[request] = self._wished(drafts[request], budget)
            elif request.reproducible:
                picks[request] = self._alone(request, drafts[request])
            else:
                free.append(request)
        floor = max((pick.budget for pick in picks.values()), default=0)
        picks |= self._together(requests, free, drafts, floor)
        return [
            Pick(picks[request].name, min(picks[request].budget, budget))
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def _wished(self, drafts: FoundInRow, budget: int) -> Pick:
        """For a row that says how much: the first look-up that found something, or the model."""
        return Pick(next(iter([*drafts, *self._models]), ""), budget)

    def _alone(self, request: Request, drafts: FoundInRow) -> Pick:
        """By the row's own history and nominal costs."""
        best, promise = Pick(), 1.0
        for name in [*drafts, *self._for_reproducible]:
            ledger = self._autos[name].ledger(request)
            width = ledger.width(request.remaining)
            if name in drafts:
                width = min(width, len(drafts[name].tokens))
            gain = ledger.gain(width, request.remaining) if width else 0.0
            # A draft that is tried although plain decoding seems best promises less than 1.
            if width and (gain > promise or not best.budget):
                best, promise = Pick(name, width), max(gain, promise)
        return best

    def _together(
        self,
        requests: Sequence[Request],
        free: Sequence[Request],
        drafts: Mapping[Request, FoundInRow],
        floor: int,
    ) -> dict[Request, Pick]:
        """For the rows that are not seeded, one choice by measured rounds."""
        if not free:
            return {}
        nothing = {request: Pick() for request in free}
        plans = [_Plan(nothing, {}, None)]
        looked_up = self._looked_up(requests, free, drafts, floor)
        if looked_up is not None:
            plans.append(looked_up)
        for name in self._models:
            plan = self._modelled(name, requests, free, looked_up, floor)
            if plan is not None:
                plans.append(plan)
        best = self._best(plans[1:]) if plans[1:] else plans[0]
        for name, offer in best.offers.items():
            self._autos[name].adopt(offer)
        return best.picks

    def _looked_up(
        self,
        requests: Sequence[Request],
        free: Sequence[Request],
        drafts: Mapping[Request, FoundInRow],
        floor: int,
    ) -> _Plan | None:
        """What look-ups found, in the rows where they found anything; None if that does not pay."""
        chosen: dict[Request, str] = {}
        for request in free:
            worth = {
                name: self._autos[name].tokens(request, len(find.tokens))
                for name, find in drafts[request].items()
            }
            if worth:
                chosen[request] = max(worth, key=worth.__getitem__)
        picks, offers = {request: Pick() for request in free}, {}
        tokens, seconds, known = float(len(free)), 0.0, True
        for name in dict.fromkeys(chosen.values()):
            rows = [request for request, each in chosen.items() if each == name]
            auto = self._autos[name]
            offer = auto.choose(requests, rows, floor)
            widths = [
                min(width, len(drafts[request][name].tokens))
                for request, width in zip(rows, offer.widths, strict=True)
            ]
            if not any(widths):
                continue
            offers[name] = offer
            picks |= {
                request: Pick(name, width) for request, width in zip(rows, widths, strict=True)
            }
            expected = auto.expected(requests, rows, widths)
            if expected is None:
                known = False
            else:
                tokens += expected[0] - len(rows)
                seconds = max(seconds, expected[1])
        if not offers:
            return None
        if not known:
            return _Plan(picks, offers, None)
        return _Plan(picks, offers, tokens / seconds, seconds)

    def _modelled(
        self,
        name: str,
        requests: Sequence[Request],
        free: Sequence[Request],
        looked_up: _Plan | None,
        floor: int,
    ) -> _Plan | None:
        """A draft model in all rows, or in those for which no look-up found anything if that is
        better; None if that does not pay."""
        auto = self._autos[name]
        offer = auto.choose(requests, free, floor, self._prospects(name))
        widths = offer.widths
        self._choices[name] = self._choices_of(name, free, looked_up)
        if not any(widths):
            return None
        picks = {r: Pick(name, width) for r, width in zip(free, widths, strict=True)}
        whole = _Plan(picks, {name: offer}, _rate(auto.expected(requests, free, widths)))
        if looked_up is None or whole.rate is None:
            return whole
        tokens, width = 0.0, max(widths)
        mixed = dict(picks)
        for request in free:
            pick = looked_up.picks[request]
            by_model = auto.tokens(request, picks[request].budget)
            by_look_up = self._autos[pick.name].tokens(request, pick.budget) if pick.budget else 0.0
            if by_look_up > by_model:
                mixed[request] = Pick(pick.name, min(pick.budget, width))
            tokens += max(by_model, by_look_up)
        expected = auto.expected(requests, free, widths)
        players = {pick.name for pick in mixed.values() if pick.budget}
        if expected is None or name not in players or players == {name}:
            return whole
        offers = {**looked_up.offers, name: offer}
        return _Plan(mixed, {name: offers[name] for name in players}, tokens / expected[1])

    def _prospects(self, name: str) -> Prospects | None:
        """What a model is expected to bring in the rest of each text, beside the look-ups; None
        while nothing is known of that."""
        savings = self._savings[name]
        if not savings.known:
            return None

        def prospect(request: Request) -> Prospect:
            text, alike = self._likeness.text(request), self._likeness.alike(request)
            ahead = self._ends.expected(alike, request.remaining, len(request.output_ids))
            return Prospect(ahead, savings.of(text, alike))

        return prospect

    def _choices_of(
        self, name: str, free: Sequence[Request], looked_up: _Plan | None
    ) -> dict[Request, Choice]:
        """What a model promises in each row of this round, and what can be had without it."""
        auto, choices = self._autos[name], {}
        promise = auto.promise
        if promise is None:
            return {}
        curve = [seconds / promise.plain for seconds in promise.curve]
        for request in free:
            without = Way(1.0, 1.0)
            pick = Pick() if looked_up is None else looked_up.picks[request]
            if pick.budget and looked_up is not None and looked_up.seconds is not None:
                tokens = self._autos[pick.name].tokens(request, pick.budget)
                found = Way(tokens, looked_up.seconds / promise.plain)
                without = min(without, found, key=lambda way: way.per_token)
            model = Way(auto.tokens(request, promise.width), promise.seconds / promise.plain)
            choices[request] = Choice(without, model, curve)
        return choices

    def _best(self, plans: Sequence[_Plan]) -> _Plan:
        """The plan that promises most; now and then the second, if that comes close. One of which
        nothing is known comes first: `Auto` sees to it that such trials are few."""
        unknown = [plan for plan in plans if plan.rate is None]
        if unknown:
            return unknown[-1]
        ranked = sorted(plans, key=lambda plan: plan.rate or 0.0, reverse=True)
        if len(ranked) > 1 and (ranked[1].rate or 0) * CLOSE > (ranked[0].rate or 0):
            self._since_second += 1
            if self._since_second >= LOOK_ASIDE:
                self._since_second = 0
                return ranked[1]
        return ranked[0]

    # -- learning ------------------------------------------------------------------------------

    def begin(self, request: Request, known: Mapping[str, int]) -> None:
        for name, auto in self._autos.items():
            auto.begin(request, {name: known.get(name, 0)})

    def record(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds | None
    ) -> None:
        widest = {name: 0 for name in self._autos}
        for outcome in outcomes:
            if outcome.drafted:
                widest[outcome.method] = max(widest[outcome.method], outcome.drafted)
        # The time of a round with several drafters is that of the one that costs most, if it is
        # also the one that drafted most; otherwise it is nobody's.
        last = next((name for name in reversed(list(widest)) if widest[name]), None)
        for name, auto in self._autos.items():
            own = [_own(outcome, name) for outcome in outcomes]
            alone = last is None or (name == last and widest[name] == max(widest.values()))
            auto.record(requests, own, seconds if alone else None)
        self._note_savings(requests, outcomes)
        self._note_ends(requests)
        self._compare(outcomes)
        if self._file is not None and any(request.finished for request in requests):
            self._file.changed()

    def account(self, request: Request) -> Account:
        account = next(iter(self._autos.values())).account(request)
        if account.mode is Mode.OFF:
            return account
        left_out = (
            set(self._models) - set(self._for_reproducible) if account.mode is Mode.NOMINAL else ()
        )
        drafters = {
            name: self._autos[name].drafter_account(request, asked=name not in left_out)
            for name in (*self._models, *self._free)
        }
        named = [
            replace(one, name=name, look_up=name in self._free) for name, one in drafters.items()
        ]
        return replace(account, drafters=tuple(named))

    def to_save(self) -> dict[str, Any]:
        """Returns what is known of texts of each kind and of what drafts cost, for a later run."""
        texts = list(self._likeness.kept)
        return {
            "texts": [text.to_save() for text in texts],
            "ends": self._ends.to_save(texts),
            "savings": {name: known.to_save(texts) for name, known in self._savings.items()},
            "drafters": {name: auto.known.to_save() for name, auto in self._autos.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what an earlier run saved."""
        texts = [Text.restored(bins) for bins in saved["texts"]]
        for text in texts:
            self._likeness.keep(text)
        self._ends.restore(saved["ends"], texts)
        for name, known in self._savings.items():
            known.restore(saved["savings"][name], texts)
        for name, auto in self._autos.items():
            auto.known.restore(saved["drafters"][name])

    def _note_savings(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Notes what the models saved, or would have saved, in the round that has ended."""
        for name, choices in self._choices.items():
            for request, outcome in zip(requests, outcomes, strict=True):
                if request in choices:
                    played = outcome.method == name and outcome.drafted > 0
                    drafted = outcome.drafted if played else None
                    saved = choices[request].saved(outcome.emitted, drafted)
                    text = self._likeness.text(request)
                    self._savings[name].note(text, outcome.emitted, saved)
            choices.clear()

    def _note_ends(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens, early = len(request.output_ids), request.remaining > 0
            asked_for_one = tokens == 1 and not early  # and says nothing of others
            if request.finished and self._models and not asked_for_one:
                self._ends.add(self._likeness.text(request), tokens, early)

    def _compare(self, outcomes: Sequence[Outcome]) -> None:
        """Tells look-ups what would have become of what they found where another one drafted."""
        for (request, found, length), outcome in zip(self._found, outcomes, strict=False):
            committed = request.output_ids[-outcome.emitted :] if outcome.emitted else ()
            if request.finished or request.length != length + outcome.emitted:
                continue
            for name, find in found.items():
                auto, played = self._autos[name], outcome.drafted and outcome.method == name
                if played:
                    trail = chain_trail(outcome.drafted, outcome.accepted)
                else:
                    trail = would_be(find.tokens, committed)
                    auto.learn(request, trail)
                auto.finds.learn(find.sure, trail)
        self._found = []


def _own(outcome: Outcome, name: str) -> Outcome:
    """A row's outcome as one drafter sees it: empty where another one drafted."""
    if outcome.drafted and outcome.method == name:
        return outcome
    return Outcome(0, 0, 0, outcome.emitted, (), name)


def _rate(expected: tuple[float, float] | None) -> float | None:
    return None if expected is None else expected[0] / expected[1]


def would_be(draft: Sequence[int], committed: Sequence[int]) -> Trail:
    """Returns what would have become of a chain, as far as the committed tokens tell.

    >>> would_be([1, 2, 3], [1, 5])
    [(1, 0), (1, None)]
    >>> would_be([1, 2, 3], [1, 2])
    [(1, 0), (1, 0)]
    """
    pairs = zip(draft, committed, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if same is None:
        return [(1, 0)] * min(len(draft), len(committed))
    return chain_trail(len(draft), same)
