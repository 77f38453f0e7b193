"""The controller "auto", which chooses drafters and draft sizes by expected tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.core.account import Account, Mode
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import TreeShape, chain_ranks, ranks_if_verified
from outpace.draft.round import DrafterChoice, LookupDraft, Outcome
from outpace.draft.state import StateFile
from outpace.policy.base import Controller, RoundPlan, cap_budgets, mode_of, requested_budget
from outpace.policy.candidate import Candidate
from outpace.policy.costs import (
    MAX_SAMPLES,
    MISS,
    PLAIN,
    SPEED_CHANGE_RATIO,
    BatchBucket,
    CostTable,
)
from outpace.policy.estimator import Estimator, RoundRequests
from outpace.policy.exploration import MAX_TRIAL_LOSS, TrialBudget
from outpace.policy.forecast import (
    RoundComparison,
    RoundEstimate,
    SavedPerToken,
    TextForecast,
    TextLengths,
)
from outpace.policy.round_state import RoundOption, RoundState, no_picks


class AutoController(Controller):
    """Chooses among plain decoding, look-ups and draft models, and how much each drafts, by the
    expected tokens for the expected seconds of each candidate.

    =======  ========================================  ==========================================
    .        a drafter that drafts alone               look-ups and models
    =======  ========================================  ==========================================
    plan     chooses how many nodes                    allows each request as many as any drafter
    pick     is not called                             knows what look-ups found, and chooses
    record   may learn that it found nothing           learns what each look-up's draft was worth
    =======  ========================================  ==========================================

    Look-ups cost nothing to ask, so their drafts are known before the choice is made. After each
    round they are compared with the committed tokens, whichever drafter was chosen. What a draft
    model brings is known from its own rounds only, so it is tried now and then. All trials share
    one budget (`TrialBudget`), and all drafters one table of costs.

    Each reproducible request is decided by its own history and nominal costs.
    """

    def __init__(self, drafters: Sequence[Estimator], file: StateFile | None = None) -> None:
        """drafters: look-ups first. If there is one only, it is asked after the choice. file: keeps
        what is learned between runs."""
        self.costs, self._budget = CostTable(), TrialBudget(credit=MAX_TRIAL_LOSS)
        self._lengths = TextLengths()
        for one in drafters:
            one.costs = self.costs
        self._candidates = {
            one.name: Candidate(one, self._budget, self._lengths) for one in drafters
        }
        self._alone = drafters[0] if len(drafters) == 1 else None
        look_ups = [one.name for one in drafters if one.look_up and not self._alone]
        self._look_ups = [self._candidates[name] for name in look_ups]
        self._models = [one for one in self._candidates.values() if one not in self._look_ups]
        self._texts = TextForecast()
        self._since_runner_up = 0
        self._round = RoundState()
        self._file = file
        if file is not None:
            saved = file.load()
            if saved is not None:
                with file.read():
                    self.from_dict(saved)
            file.keep(self.to_dict)

    def __getitem__(self, name: str) -> Estimator:
        """Returns what is known of one drafter."""
        return self._candidates[name].estimator

    @property
    def _estimators(self) -> list[Estimator]:
        return [one.estimator for one in self._candidates.values()]

    # -- choosing ------------------------------------------------------------------------------

    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        self._round = RoundState()
        shape: TreeShape | None = None
        learned = not any(request.reproducible for request in requests)
        for one in self._estimators:
            shape = one.prepare(learned) or shape
            terms = one.terms(requests, terms)
        most = max(one.most for one in self._estimators)
        requested = map(requested_budget, requests)
        budgets = [most if budget is None else budget for budget in requested]
        if self._alone is not None:
            budgets = [pick.budget for pick in self._picks(requests, budgets)]
            within = zip(requests, cap_budgets(requests, budgets), strict=True)
            self._round.asked = frozenset(request for request, budget in within if budget)
        # With several drafters the choice is made when look-ups have been asked (`pick`).
        return RoundPlan(budgets, terms, shape)

    def pick(
        self,
        requests: Sequence[Request],
        found: Mapping[str, Sequence[LookupDraft]],
        budgets: Sequence[int],
    ) -> list[DrafterChoice]:
        names = [one.name for one in self._look_ups]
        self._round.lookup_drafts = {
            request: {name: found[name][row] for name in names if found[name][row].tokens}
            for row, request in enumerate(requests)
        }
        for one in self._estimators:
            name = one.name
            one.lookup_drafts = {
                request: drafts[name]
                for request, drafts in self._round.lookup_drafts.items()
                if name in drafts
            }
            for request, budget in zip(requests, budgets, strict=True):
                if budget and name in names:
                    one.text(request).tally.ask(request in one.lookup_drafts)
        picks = zip(self._picks(requests, budgets), budgets, strict=True)
        return [DrafterChoice(pick.name, min(pick.budget, budget)) for pick, budget in picks]

    def _picks(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DrafterChoice]:
        picks, adaptive = {}, []
        for request, budget in zip(requests, budgets, strict=True):
            if not budget:
                picks[request] = DrafterChoice()
            elif requested_budget(request) is not None:
                # The first look-up that found something, or the model.
                found = self._round.lookup_drafts.get(request, ())
                models = [one.name for one in self._models if self._drafts_for(request, one)]
                name = next(iter([*found, *models]), "")
                picks[request] = DrafterChoice(name, budget if name else 0)
            elif request.reproducible:
                picks[request] = self._nominal(request)
            else:
                adaptive.append(request)
        min_size = max((self._certain(*each) for each in picks.items()), default=0)
        if adaptive:
            self._round.chosen = self._measured(RoundRequests(requests, adaptive, min_size))
            picks |= self._round.chosen.picks
        named = {one.name for one in self._models if one.estimator is not self._alone}
        self._round.models = {
            request: pick.name
            for request, pick in picks.items()
            if pick.budget and pick.name in named and request.remaining > 1
        }
        return [picks[request] for request in requests]

    @staticmethod
    def _drafts_for(request: Request, one: Candidate) -> bool:
        """Whether a drafter drafts anything for such a request."""
        return not (request.reproducible and one.estimator.skips_reproducible)

    def _certain(self, request: Request, pick: DrafterChoice) -> int:
        """How many nodes are drafted for a request in any case: a look-up that has not been asked
        may find nothing."""
        if self._alone is not None:
            lone = self._candidates[self._alone.name]
            return 0 if self._alone.look_up or not self._drafts_for(request, lone) else pick.budget
        find = self._round.lookup_drafts.get(request, {}).get(pick.name)
        return pick.budget if find is None else min(pick.budget, len(find.tokens))

    def _nominal(self, request: Request) -> DrafterChoice:
        """Which drafter drafts for a reproducible request."""
        best, promise, drafts = DrafterChoice(), 1.0, self._round.lookup_drafts.get(request, {})
        able = [self._candidates[name] for name in drafts]
        able += [one for one in self._models if self._is_able(one.estimator)]
        for one in able:
            size, rate = one.nominal(request, drafts.get(one.name))
            # A trial promises less than 1.
            if size and (rate > promise or not best.budget):
                best, promise = DrafterChoice(one.name, size), max(rate, promise)
        return best

    def _is_able(self, one: Estimator) -> bool:
        """Whether a drafter drafts for reproducible requests; the only one decides that itself."""
        return one is self._alone or not one.skips_reproducible

    def _measured(self, batch: RoundRequests) -> RoundOption:
        """The best option by measured rounds. Now and then it is one close to the best instead, the
        one that was measured longest ago: a bad measurement may hide that it is better. An option
        of unknown time comes first; the budget for trials keeps those few."""
        nothing = RoundOption(no_picks(batch), len(batch.adaptive), self.costs.plain(batch.bucket))
        if self.costs.doubted(batch.bucket) and not batch.min_size:
            return nothing
        looked_up = self._looked_up(batch)
        found = [looked_up, *(self._modelled(one, batch, looked_up) for one in self._models)]
        options = [option for option in found if option is not None]
        unknown = [option for option in options if option.rate is None]
        best = max(unknown[-1:] or options, key=lambda option: option.rate or 0.0, default=nothing)
        if options and not unknown and not batch.min_size:
            close = (best.rate or 0.0) / SPEED_CHANGE_RATIO
            others = [option for option in (nothing, *options) if option is not best]
            others = [option for option in others if (option.rate or 0.0) > close]
            self._since_runner_up += bool(others)
            if self._since_runner_up >= MAX_SAMPLES:
                self._since_runner_up = 0
                best = max(others, key=lambda option: self._age(batch.bucket, option))
        for trial in best.trials.values():
            if trial is not None:
                trial.charge_text()
        return best

    def _age(self, bucket: BatchBucket, option: RoundOption) -> int:
        """How many rounds ago a round like this was measured."""
        largest = max(option.picks.values(), key=lambda pick: pick.budget)
        return self.costs.age(bucket, largest.name, largest.budget)

    def _looked_up(self, batch: RoundRequests) -> RoundOption | None:
        """The look-ups' drafts for the requests for which they found something; None if that does
        not pay."""
        chosen: dict[Request, str] = {}
        for request in batch.adaptive:
            worth = {
                name: self[name].tokens(request, len(draft.tokens))
                for name, draft in self._round.lookup_drafts.get(request, {}).items()
            }
            if worth:
                chosen[request] = max(worth, key=worth.__getitem__)
        if not chosen:
            return None
        option = RoundOption(no_picks(batch), len(batch.adaptive), 0.0)
        for name in dict.fromkeys(chosen.values()):
            one, requests = self[name], [request for request, by in chosen.items() if by == name]
            own = RoundRequests(batch.requests, requests, batch.min_size)
            plan = self._candidates[name].plan(own)
            sizes = [
                min(size, len(one.lookup_drafts[request].tokens))
                for request, size in zip(requests, plan.sizes, strict=True)
            ]
            if not any(sizes):
                continue
            option.trials[name] = plan.trial
            for request, size in zip(requests, sizes, strict=True):
                option.picks[request] = DrafterChoice(name, size)
                option.tokens += one.tokens(request, size) - 1
            seconds = one.seconds(own, max(sizes))
            if seconds is None or option.seconds is None:
                option.seconds = None
            else:
                option.seconds = max(option.seconds, seconds)
        return option if option.trials else None

    def _modelled(
        self, model: Candidate, batch: RoundRequests, looked_up: RoundOption | None
    ) -> RoundOption | None:
        """A model's drafts for all requests, or only for those for which look-ups found nothing
        better; None if that does not pay."""
        one, plan = model.estimator, model.plan(batch, self._saved_per_token(model))
        if self._look_ups:
            self._round.comparisons[one.name] = self._comparisons_of(model, batch, looked_up)
        size = max(plan.sizes)
        if not size:
            return None
        seconds = None if model.forecast is None else model.forecast.costs[size]
        pairs = zip(batch.adaptive, plan.sizes, strict=True)
        picks = {
            request: DrafterChoice(one.name if count else "", count) for request, count in pairs
        }
        alone = RoundOption(picks, 0.0, seconds, {one.name: plan.trial})
        mixed = RoundOption(dict(picks), 0.0, seconds, {one.name: plan.trial})
        for request, pick in picks.items():
            tokens = one.tokens(request, pick.budget)
            alone.tokens += tokens
            find = looked_up.picks[request] if looked_up is not None else DrafterChoice()
            cut = min(find.budget, size)
            if looked_up is not None and cut and self[find.name].tokens(request, cut) > tokens:
                mixed.picks[request] = DrafterChoice(find.name, cut)
                mixed.trials[find.name] = looked_up.trials[find.name]
                tokens = self[find.name].tokens(request, cut)
            mixed.tokens += tokens
        names = {pick.name for pick in mixed.picks.values() if pick.budget}
        return mixed if {one.name} < names and mixed.seconds is not None else alone

    def _saved_per_token(self, model: Candidate) -> SavedPerToken | None:
        """What a model is expected to save in each text on top of the look-ups; None while that is
        unknown, or where it drafts alone."""
        texts, name = self._texts, model.name
        if not self._look_ups or not texts.knows(name):
            return None
        return lambda request: texts.saves(request, name)

    def _comparisons_of(
        self, model: Candidate, batch: RoundRequests, looked_up: RoundOption | None
    ) -> dict[Request, RoundComparison]:
        """For each adaptive request, the ways to run this round with a model and without it."""
        forecast, plain = model.forecast, self.costs.plain(batch.bucket)
        if forecast is None or plain is None:
            return {}
        size, curve = forecast.best_nonzero, [seconds / plain for seconds in forecast.curve]
        comparisons = {}
        for request in batch.adaptive:
            without = RoundEstimate(1.0, 1.0)
            pick = DrafterChoice() if looked_up is None else looked_up.picks[request]
            if pick.budget and looked_up is not None and looked_up.seconds is not None:
                tokens = self[pick.name].tokens(request, pick.budget)
                found = RoundEstimate(tokens, looked_up.seconds / plain)
                without = min(without, found, key=lambda way: way.per_token)
            tokens = model.estimator.tokens(request, size)
            comparisons[request] = RoundComparison(
                without, RoundEstimate(tokens, forecast.costs[size] / plain), curve
            )
        return comparisons

    # -- learning ------------------------------------------------------------------------------

    def begin(self, request: Request, computed: Mapping[str, int]) -> None:
        least = min(computed.values(), default=0)
        for one in self._estimators:
            one.begin(request, least if self._alone else computed.get(one.name, 0))

    def record(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds | None
    ) -> None:
        pairs = zip(requests, outcomes, strict=True)
        bucket = BatchBucket.of(
            len(requests), max(request.length - each.emitted for request, each in pairs)
        )
        if seconds is not None:
            self._learn_times(bucket, requests, outcomes, seconds)
        for one in self._estimators:
            one.grow(bucket)
        for request, outcome in zip(requests, outcomes, strict=True):
            # Nothing is decided about a last token, which needs no draft.
            decided = request.remaining + outcome.emitted > 1 and mode_of(request) is Mode.MEASURED
            for candidate in self._candidates.values():
                own = self._own(outcome, candidate.estimator)
                candidate.record(request, own, decided, request in self._round.asked)
        self._learn_savings(requests, outcomes)
        self._learn_lookups(requests, outcomes)
        self._round = RoundState()
        for request in requests:
            self._lengths.note(request)
        if self._file is not None and any(request.finished for request in requests):
            self._file.changed()

    def _own(self, outcome: Outcome, one: Estimator) -> Outcome:
        """A request's outcome as one drafter sees it: empty where another one drafted."""
        if one is self._alone or (outcome.drafted and outcome.method == one.name):
            return outcome
        return Outcome(0, 0, 0, outcome.emitted, (), one.name)

    def _learn_times(
        self,
        bucket: BatchBucket,
        requests: Sequence[Request],
        outcomes: Sequence[Outcome],
        seconds: Seconds,
    ) -> None:
        """Enters the time of a round. Where several drafters drafted, it counts for the last of
        them, which is the model if that drafted, if that one also drafted most; otherwise for
        none."""
        largest: dict[str, int] = {}
        changes = self.costs.changes
        for outcome in outcomes:
            name = self._alone.name if self._alone else outcome.method
            if outcome.drafted:
                largest[name] = max(outcome.drafted, largest.get(name, 0))
        drafting = [one for one in self._estimators if one.name in largest]
        begun = all(self._estimators[0].text(request).rounds for request in requests)
        asked, chosen = self._round.asked, self._round.chosen
        if asked and self._alone and begun:
            found = sum(outcome.drafted > 0 for outcome in outcomes)
            self._alone.learn_asking(found, len(asked))
        ran = [one for one in self._estimators if one.name in self._round.models.values()]
        for one in ran if begun else ():
            found = sum(outcome.method == one.name and outcome.drafted > 0 for outcome in outcomes)
            one.learn_asking(found, found or 1)
        if not largest and begun:
            missed = self._alone.name if self._alone and asked else next((o.name for o in ran), "")
            read = [
                self[name].note_prefilled(request) for request, name in self._round.models.items()
            ]
            if all(read):  # or it is the time of reading
                self.costs.add(bucket, missed, MISS if missed else PLAIN, seconds, 0)
        elif largest and largest[drafting[-1].name] == max(largest.values()):
            own = [self._own(outcome, drafting[-1]) for outcome in outcomes]
            drafting[-1].learn_times(bucket, requests, own, seconds, begun)
        if self.costs.changes > changes:
            self._budget.renew()
        if chosen is None:
            return
        self._budget.spent += seconds.total
        plain = self.costs.plain(bucket)
        for name, trial in chosen.trials.items():
            if trial and plain is not None and (largest or asked or ran):
                self._candidates[name].record_trial(bucket, seconds, plain, outcomes)

    def _learn_savings(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Notes what the models saved, or would have saved."""
        for name, comparisons in self._round.comparisons.items():
            for request, outcome in zip(requests, outcomes, strict=True):
                if request in comparisons:
                    by_model = outcome.method == name and outcome.drafted > 0
                    drafted = outcome.drafted if by_model else None
                    saved = comparisons[request].saved(outcome.emitted, drafted)
                    self._texts.note(request, name, outcome.emitted, saved)

    def _learn_lookups(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Learns what became of the look-ups' drafts, or would have where another one drafted."""
        for request, outcome in zip(requests, outcomes, strict=True):
            drafts = self._round.lookup_drafts.get(request)
            if drafts is None or request.finished:
                continue
            committed = request.output_ids[-outcome.emitted :] if outcome.emitted else ()
            for name, draft in drafts.items():
                if outcome.drafted and outcome.method == name:
                    ranks = chain_ranks(outcome.drafted, outcome.accepted)
                else:
                    ranks = ranks_if_verified(draft.tokens, committed)
                    self[name].learn(request, ranks)
                self[name].learn_lookup(draft, ranks)

    # -- accounts ------------------------------------------------------------------------------

    def account(self, request: Request) -> Account:
        mode = mode_of(request)
        listed = [*self._models, *self._look_ups] if mode is not Mode.OFF else []
        accounts = [
            one.account(request, mode, one in self._look_ups or self._is_able(one.estimator))
            for one in listed
        ]
        return Account(mode, self._estimators[0].text(request).rounds, tuple(accounts))

    def to_dict(self) -> dict[str, Any]:
        """Returns what is known of texts and of costs, for a later run. How often drafts are
        accepted is learned anew within a text or two."""
        costs = self.costs.to_dict(list(self._candidates))
        return {"savings": self._texts.to_dict(), "drafters": costs}

    def from_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what an earlier run saved."""
        self._texts.from_dict(saved["savings"])
        self.costs.from_dict(saved["drafters"], list(self._candidates))
