"""One drafter as a candidate for the coming round: how many tokens it would draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakSet

from outpace.core.account import DrafterAccount, Mode, Reason
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.draft.round import LookupDraft, Outcome
from outpace.policy.costs import PLAIN, BatchBucket
from outpace.policy.curves import MIN_SAMPLES
from outpace.policy.estimator import Estimator, RoundRequests
from outpace.policy.exploration import MAX_TRIAL_LOSS, TEXT_TRIAL_SHARE, Backoff, TrialBudget
from outpace.policy.forecast import PREFILL_DELAY, Forecast, SavedPerToken, TextLengths
from outpace.policy.text import TextState


@dataclass(frozen=True)
class Trial:
    """A draft that is tried although plain decoding seems better."""

    loss: float
    """Plain rounds that it is expected to lose."""
    text: TextState | None = None
    """The text that is charged for the trial, if the drafter has to read that text first."""

    def charge_text(self) -> None:
        """Charges the text for the trial, which is made."""
        if self.text is not None:
            self.text.lost += self.loss


@dataclass(frozen=True)
class CandidatePlan:
    """What a drafter would draft in the coming round."""

    sizes: Sequence[int]
    """Nodes for each of the adaptive requests."""
    trial: Trial | None = None


class Candidate:
    """Chooses the size of one drafter's drafts: that with most expected tokens for the expected
    cost (`Estimator`), or none.

    Where plain decoding seems best, a draft is tried as often as the budget for trials allows. It
    is tried for one request: that suffices to measure a round, and the drafter reads one prompt.
    """

    def __init__(
        self, estimator: Estimator, budget: TrialBudget, lengths: TextLengths | None = None
    ) -> None:
        """budget: for the trials of all candidates together. lengths: what is known of those of
        texts."""
        self.estimator, self._budget = estimator, budget
        self._lengths = lengths or TextLengths()
        self.forecast: Forecast | None = None  # the latest; None if nothing is known
        self._backoff: Backoff | None = None
        # For the account: why it did not draft; what a node and reading cost, in plain rounds.
        self._reason: Reason | None = None
        self._cost: float | None = None
        self._reading: float | None = None
        self._left_out = WeakKeyDictionary[Request, float]()
        """What reading a request's text costs, in plain rounds, where that was not repaid."""

    @property
    def name(self) -> str:
        return self.estimator.name

    # -- by measured costs ---------------------------------------------------------------------

    def plan(self, batch: RoundRequests, saves: SavedPerToken | None = None) -> CandidatePlan:
        """Returns how many nodes to draft for each of the adaptive requests.

        saves: what the drafter saves on top of the others; unset: what its present forecast says.
        """
        if self.estimator.stopping is not None:
            self.estimator.stopping.begin(batch.adaptive)
        size, trial, chosen = self._size(batch, saves)
        sizes = [size if request in chosen else 0 for request in batch.adaptive]
        return CandidatePlan(sizes, trial)

    def _cheapest(self, batch: RoundRequests) -> Request:
        """The request for which it costs least to try a draft."""
        return min(batch.adaptive, key=self.estimator.num_uncomputed_tokens)

    def _size(
        self, batch: RoundRequests, saves: SavedPerToken | None
    ) -> tuple[int, Trial | None, Collection[Request]]:
        """The size of the coming drafts, the trial that they are, if they are one, and for whom
        they are."""
        if self._backoff is not None and self._backoff.lasts(batch.bucket, batch.adaptive):
            return 0, None, ()
        one, costs = self.estimator, self.estimator.costs
        self._backoff = self.forecast = None
        self._left_out.clear()
        plain = costs.plain(batch.bucket)
        if plain is None or costs.times_measured(batch.bucket, one.name, PLAIN) < MIN_SAMPLES:
            self._reason = self._reason or Reason.UNMEASURED
            return 0, None, ()  # all others are measured against it
        cheapest = self._cheapest(batch)
        reading = costs.prefill_seconds(one.name, one.num_uncomputed_tokens(cheapest), plain)
        self.forecast = forecast = one.forecast(batch)
        if forecast is None:
            self._reason, self._cost, self._reading = Reason.UNTRIED, None, reading / plain
            untried = Trial(reading / plain)
            return *self._if_affordable(one.sizes.values[1], untried, plain), (cheapest,)
        nodes = forecast.best_nonzero
        self._cost = max(0.0, forecast.curve[nodes] - plain) / (nodes * plain)
        promising = forecast.best > 0
        self._reading = reading / plain if promising else None
        chosen: list[Request] = []
        waiting, own = False, forecast
        if promising:
            chosen, waiting = self._worth_prefilling(batch, forecast.gain, plain, saves)
        if 0 < len(chosen) < len(batch.adaptive):  # the others get no drafts in this round
            own = one.forecast(replace(batch, adaptive=chosen)) or forecast
            if own.best:  # which may be worth less in fewer rows
                chosen, waiting = self._worth_prefilling(batch, own.gain, plain, saves)
        if chosen and own.best:
            self._reason, self.forecast = Reason.GAIN, own
            # Chains that are ended are no longer than pays, however long they might be.
            return (own.best if one.stopping is None else one.most), None, chosen
        self._reason = Reason.READING if promising and not chosen else Reason.NO_GAIN
        if waiting:
            return 0, None, ()
        size = one.sizes.values[1]
        # One request gets a draft, and the round is longer for all.
        more = (forecast.tokens[size] - forecast.tokens[0]) / len(batch.adaptive) ** 2
        longer = (forecast.costs[size] - plain + reading) / plain
        trial = Trial(max(0.0, longer - more), one.text(cheapest) if reading else None)
        found = self._if_affordable(size, trial, plain)
        self._backoff = None if found[1] else Backoff(batch.bucket, WeakSet(batch.adaptive))
        return *found, (cheapest,)

    def _if_affordable(self, size: int, trial: Trial, plain: float) -> tuple[int, Trial | None]:
        """The size and the trial, if the budget allows it; else nothing is drafted.

        What trials may cost a text is a share of its rounds, not of its tokens: a text that is
        copied from its prompt has few rounds for many tokens, and would pay for reading a long
        prompt in vain.
        """
        text = trial.text
        borne = text is None or text.lost + trial.loss <= TEXT_TRIAL_SHARE * text.rounds
        allowed = borne and self._budget.allows(trial.loss * plain, plain)
        return (size, trial) if allowed else (0, None)

    def _worth_prefilling(
        self, batch: RoundRequests, gain: float, plain: float, saves: SavedPerToken | None
    ) -> tuple[list[Request], bool]:
        """The requests in which drafting is expected to repay what has to be read for it, and
        whether one of the others only waits to be read, until it has some tokens. All rows wait
        while one is read, and rows that were read before do not help to pay."""
        one, chosen, waiting = self.estimator, [], False
        self._left_out.clear()
        for request in batch.adaptive:
            unread = one.num_uncomputed_tokens(request)
            reading = one.costs.prefill_seconds(self.name, unread, plain) / plain
            saved = 1 - 1 / gain if saves is None else saves(request)
            rows = len(batch.requests)
            repaid = not unread or self._lengths.is_prefill_repaid(reading, rows, request, saved)
            waits = len(request.output_ids) < PREFILL_DELAY * reading
            if repaid and not waits:
                chosen.append(request)
            else:
                self._left_out[request] = reading
                waiting |= repaid
        return chosen, waiting

    def record_trial(
        self, bucket: BatchBucket, seconds: Seconds, plain: float, outcomes: Sequence[Outcome]
    ) -> None:
        """Enters what a trial has lost."""
        if not any(outcome.drafted for outcome in outcomes):  # it was asked, and found nothing
            self._budget.enter(self.estimator.costs.miss(bucket, self.name), plain)
            return
        more = sum(outcome.emitted for outcome in outcomes) / len(outcomes) - 1
        # Plain rounds that were slow just before do not make the time of drafting disappear.
        longer = max(seconds.total - plain, seconds.draft)
        self._budget.enter(min(longer, (MAX_TRIAL_LOSS - 1) * plain) - plain * more, plain)

    # -- by a text's own history and nominal costs ---------------------------------------------

    def nominal(self, request: Request, draft: LookupDraft | None = None) -> tuple[int, float]:
        """Returns how many nodes to draft in a reproducible text, and the tokens that they promise
        for the cost of a pass of the target: less than 1 for a trial. draft: what a look-up has
        found.

        The losses and gains of all drafts against plain decoding are added up. While too much was
        lost, nothing is drafted. Where plain decoding seems best, the smallest draft is tried.
        """
        one, room = self.estimator, request.remaining - 1  # one token comes anyway
        if room <= 0:
            return 0, 1.0
        forecast = one.nominal_forecast(request, room)
        size = forecast.best or one.static.values[1]
        loss = 0.0 if forecast.best else forecast.costs[size] * (1 - forecast.rates[size])
        if not one.text(request).nominal.allows(loss):
            return 0, 1.0
        if draft is None or len(draft.tokens) >= size:
            return size, forecast.rates[size]
        size = len(draft.tokens)
        below = max(each for each in one.static.values if each <= size)
        cost = one.nominal.round(size, one.static.levels[below])
        return size, forecast.tokens[below] / cost

    # -- what came of it -----------------------------------------------------------------------

    def record(self, request: Request, outcome: Outcome, decided: bool, asked: bool) -> None:
        """Learns from what became of a request's draft. decided: measured rounds decided about it.
        asked: whether the drafter was asked for it, if it is not a look-up among several
        drafters."""
        tally = self.estimator.text(request).tally
        reason = Reason.READING if request in self._left_out else self._reason
        tally.count(outcome, reason if decided else None)
        if asked:
            tally.ask(found=outcome.drafted > 0)
        self.estimator.record(request, outcome)

    def account(self, request: Request, mode: Mode, able: bool = True) -> DrafterAccount:
        """Returns what came of it in a request's text. able: it was a candidate in this text."""
        one, chance = self.estimator, None
        text, cost, reading, reason = one.text(request), None, None, None
        if mode is Mode.MEASURED:
            cost, reading = self._cost, self._left_out.get(request, self._reading)
            if one.acceptance.tried:
                chance = one.acceptance.chances(text.counts, 1)[0][0]
        elif mode is Mode.NOMINAL and able:
            forecast = one.nominal_forecast(request, one.static.shape.height)
            best = forecast.best_nonzero
            cost = (forecast.costs[best] - 1) / best
            reason = Reason.GAIN if forecast.rates[best] > forecast.rates[0] else Reason.NO_GAIN
            if text.counts.tried:
                chance = text.counts.chances(1)[0][0]
        return text.tally.account(
            one.name, look_up=one.look_up, chance=chance, cost=cost, reading=reading, reason=reason
        )
