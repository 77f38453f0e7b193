"""Estimates of the tokens and the cost of one drafter's rounds, by the size of its drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from outpace.core.proposal import DraftingTerms
from outpace.core.request import PerRequest, Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import AcceptedRanks, TreeShape, chain_ranks
from outpace.draft.base import CATCH_UP_TOKENS
from outpace.draft.round import LookupDraft, Outcome
from outpace.policy.acceptance import (
    COUNT_DECAY,
    PRIOR,
    Acceptance,
    Calibration,
    Ratio,
    ranges_of,
)
from outpace.policy.costs import BatchBucket, CostTable
from outpace.policy.curves import MIN_SAMPLES
from outpace.policy.exploration import TrialBudget
from outpace.policy.forecast import Forecast
from outpace.policy.nominal import NominalCosts
from outpace.policy.shapes import DraftSizes, GrownTrees
from outpace.policy.stopping import EarlyStopping, expected_seconds
from outpace.policy.text import TextState


@dataclass(frozen=True)
class RoundRequests:
    """The requests of a round."""

    requests: Sequence[Request]
    adaptive: Sequence[Request]
    """Those whose drafts are chosen by measured rounds, here and now."""
    min_size: int = 0
    """Nodes that are drafted for some other one in any case."""

    @cached_property
    def bucket(self) -> BatchBucket:
        """The batch's size and longest context."""
        return BatchBucket.of(len(self.requests), max(each.length for each in self.requests))


class Estimator:
    """Forecasts what a drafter's rounds bring and cost.

    For every size n a round is expected to take T(n) seconds, the median of such rounds at this
    batch and context, and to bring 1 + a_1 + a_1 a_2 + ... tokens in each row. All rows get the
    same size, since smaller drafts are padded to the largest; a row gets less only where its text
    is about to end.

    Times differ from run to run, and what is drafted decides which random numbers a sampled text
    meets. So for a `reproducible` row the costs are `NominalCosts` and the chances those of its own
    rounds (Leviathan et al. 2022, section 3.3, with a chance for each depth).

    A drafter that stands for others and chooses among them itself is one drafter here.
    """

    def __init__(
        self,
        name: str,
        drafts: DraftSizes | GrownTrees,
        nominal: NominalCosts | None = None,
        *,
        prior: float = PRIOR,
        look_up: bool = False,
        needs_no_prefill: bool = False,
        can_stop_early: bool = False,
        skips_reproducible: bool = False,
    ) -> None:
        """drafts: the sizes to choose from. prior: the chance of a first token before anything is
        known. look_up: it runs no model. needs_no_prefill: it reads nothing before it drafts.
        can_stop_early: its chains may be ended by its probabilities of their tokens.
        skips_reproducible: it drafts nothing for reproducible rows."""
        self.name, self.look_up, self.skips_reproducible = name, look_up, skips_reproducible
        self._grown = drafts if isinstance(drafts, GrownTrees) else None
        self.static = drafts.static if isinstance(drafts, GrownTrees) else drafts
        self.sizes = self.static  # of the present round
        self.nominal, self._needs_no_prefill = nominal or NominalCosts(), needs_no_prefill
        self._any_tree = self._grown is None and self.static.shape.is_chain
        self.costs = CostTable()  # until it shares one with others
        self.acceptance = Acceptance(prior)
        self.stopping = EarlyStopping() if can_stop_early else None
        self._calibration = Calibration(memory=COUNT_DECAY)
        self._levels = Ratio()
        self._found = Ratio(prior=1.0)  # of the rounds in which it was asked
        self._rows_found = Ratio(prior=1.0)  # of the rows, where it found anything
        self._texts = PerRequest(self._new_text, lasting=True)
        self._learned = 0  # how often something was learned of acceptance
        self.lookup_drafts: Mapping[Request, LookupDraft] = {}  # of this round, if it was asked

    def _new_text(self, request: Request) -> TextState:
        counts = self.acceptance.new()
        chains = counts if self.stopping is None else self.stopping.new()
        return TextState(counts, chains, TrialBudget(), Ratio())

    def text(self, request: Request) -> TextState:
        """Returns what is known of it in a request's text."""
        return self._texts[request]

    def begin(self, request: Request, computed: int) -> None:
        """Notes that a text joins the batch, perhaps again. computed: how many of its tokens the
        drafter has cached."""
        text = self.text(request)
        text.read, text.drafted = computed, False

    def num_uncomputed_tokens(self, request: Request, since: int = 0) -> int:
        """Returns the tokens that it has to read before it can draft for a row, as of ``since``
        tokens ago. A few are read together with the last one, and count as none."""
        text = self.text(request)
        left = request.length - since - text.read
        along = text.drafted or (text.read and left <= CATCH_UP_TOKENS)
        return 0 if self._needs_no_prefill or along else left

    def note_prefilled(self, request: Request) -> bool:
        """Notes that a text was read in which it was asked, in a round that has been run. Returns
        whether it had been read before."""
        text = self.text(request)
        before, text.read = text.read, max(text.read, request.length - 1)
        return self._needs_no_prefill or bool(before)

    @property
    def most(self) -> int:
        """Nodes of the largest draft to choose from."""
        return self.sizes.values[-1]

    # -- before a round ------------------------------------------------------------------------

    def prepare(self, learned: bool) -> TreeShape | None:
        """Begins a round; returns the tree whose first nodes are drafted, if the drafter leaves it
        open. learned: the tree may depend on what was learned, because no row is reproducible."""
        self.lookup_drafts = {}
        if self._grown is None:
            return None
        self.sizes = self._grown.learned if learned else self.static
        return self.sizes.shape

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        """Returns the rule's terms with what ends this round's chains, if anything does."""
        return terms if self.stopping is None else self.stopping.terms(requests, terms)

    def tokens(self, request: Request, nodes: int) -> float:
        """Returns the tokens that a round with ``nodes`` nodes is expected to bring a request."""
        found = self._expected(request)
        return found[nodes if nodes in found else max(size for size in found if size <= nodes)]

    def seconds(self, batch: RoundRequests, nodes: int) -> float | None:
        """Returns the seconds that a round with ``nodes`` nodes is expected to take; None while
        nothing is known of these."""
        curve = self.curve(batch, max(nodes, batch.min_size))
        if curve is None:
            return None
        return self._takes(batch.adaptive, curve, nodes, batch.min_size)[nodes]

    def forecast(self, batch: RoundRequests) -> Forecast | None:
        """Returns what the sizes promise; None while nothing is known of a round's time."""
        curve = self.curve(batch, batch.min_size)
        if curve is None:
            return None
        takes = self._takes(batch.adaptive, curve, self.most, batch.min_size)
        # A draft has to pay for the rounds before it in which asking brought nothing.
        asking = (1 / self._found.value - 1) * self.costs.miss(batch.bucket, self.name)
        # Requests whose size is not chosen here bring the same whatever is chosen.
        others = len(batch.requests) - len(batch.adaptive)
        tokens = self._tokens(batch.adaptive)
        forecast = Forecast(
            {size: others + each for size, each in tokens.items()},
            {size: takes[size] + asking * (size > 0) for size in tokens},
            curve,
        )
        if self.stopping is not None:
            self.stopping.set_thresholds(forecast.rates[forecast.best], curve)
        return forecast

    def nominal_forecast(self, request: Request, room: int) -> Forecast:
        """Returns what the sizes promise in a reproducible text, in passes of the target. room:
        levels that may be drafted."""
        text, sizes = self.text(request), self.static
        chances = text.counts.chances(sizes.shape.height, sizes.shape.max_siblings)
        tokens = sizes.tokens(chances, room, text.levels.value)
        costs = {size: self.nominal.round(size, sizes.levels[size]) for size in tokens}
        return Forecast(tokens, costs)

    def curve(self, batch: RoundRequests, nodes: int) -> Sequence[float] | None:
        """Returns the seconds of a round by its size, up to this one at least."""
        heights = self.sizes.heights(max(nodes, self.most))
        return self.costs.curve(batch.bucket, self.name, heights)

    def _takes(
        self, adaptive: Sequence[Request], curve: Sequence[float], largest: int, min_size: int
    ) -> list[float]:
        """The seconds that a round is expected to take, for each size up to this one."""
        if self.stopping is None:
            return [curve[max(size, min_size)] for size in range(largest + 1)]
        survival_probs = self.stopping.survival_probs(
            [self.text(request).chains for request in adaptive], largest
        )
        return expected_seconds(curve, survival_probs, min_size)

    def _tokens(self, adaptive: Sequence[Request]) -> dict[int, float]:
        """What each size is expected to bring in all adaptive rows together. A look-up finds
        something for some of the rows only; the others get the one token of every round."""
        share = self._rows_found.value
        totals = dict.fromkeys(self.sizes.values, 0.0)
        for request in adaptive:
            for size, tokens in self._expected(request).items():
                totals[size] += 1 + share * (tokens - 1)
        return totals

    def _expected(self, request: Request) -> Mapping[int, float]:
        """What each size is expected to bring a request. It is computed again only after something
        was learned: in plain rounds nothing is, and they must not become slower."""
        text, sizes = self.text(request), self.sizes
        height, room = sizes.shape.height, request.remaining - 1
        draft = self.lookup_drafts.get(request)
        if draft is not None and draft.confidence:
            table = self._calibration.chances()
            found = [[table[at]] for at in ranges_of(draft.confidence[:height])]
            return sizes.tokens([*found, *[[0.0]] * (height - len(found))], room)
        levels = self._levels.value if self._any_tree else 1.0
        known = (sizes, self._learned, levels, min(room, height))
        if text.expected is None or text.expected[0] != known:
            chances = self.acceptance.chances(text.counts, height, sizes.shape.max_siblings)
            text.expected = known, sizes.tokens(chances, room, levels)
        return text.expected[1]

    # -- after a round -------------------------------------------------------------------------

    def record(self, request: Request, outcome: Outcome) -> None:
        """Learns from what became of a row's draft."""
        text = self.text(request)
        text.drafted = outcome.drafted > 0
        text.rounds += 1
        cost = self.nominal.round(outcome.drafted, outcome.depth)
        text.nominal.spent += cost
        if outcome.drafted:
            text.read = request.length
            text.nominal.enter(cost - outcome.emitted)
            if self.static.shape.is_chain:  # or trees whose shape is not known beforehand
                text.levels.add(outcome.depth, outcome.drafted)
            if self._any_tree:
                self._levels.add(outcome.depth, outcome.drafted)
        # Of a text that has ended, part of the draft was cut off and says nothing.
        if outcome.depth and not request.finished:
            self.learn(request, self._ranks(request, outcome))

    def learn(self, request: Request, ranks: AcceptedRanks) -> None:
        """Learns from what became of a draft, or would have become of one that was not
        verified."""
        self.acceptance.learn(self.text(request).counts, ranks)
        self._learned += 1

    def learn_lookup(self, draft: LookupDraft, ranks: AcceptedRanks) -> None:
        """Learns how often a look-up's tokens of each confidence are accepted."""
        accepted = sum(rank is not None for _, rank in ranks)
        tested = ranges_of(draft.confidence[: len(ranks)])
        self._calibration = self._calibration.with_draft(tested, accepted)

    def learn_asking(self, found: int, asked: int) -> None:
        """Learns from a round in which it was asked for some rows and found something for some."""
        self._found.add(found > 0, 1)
        if found:
            self._rows_found.add(found, asked)

    def _ranks(self, request: Request, outcome: Outcome) -> AcceptedRanks:
        if self.stopping is not None:
            return self.stopping.learn(request, self.text(request).chains, outcome)
        shape = self.sizes.shape
        if shape.is_chain or outcome.depth == outcome.drafted:
            return chain_ranks(outcome.depth, outcome.accepted)
        return shape.extended(outcome.drafted).first(outcome.drafted).accepted_ranks(outcome.path)

    def learn_times(
        self,
        bucket: BatchBucket,
        requests: Sequence[Request],
        outcomes: Sequence[Outcome],
        seconds: Seconds,
        begun: bool,
    ) -> None:
        """Learns from how long a round took in which it drafted, before `record`. begun: no row had
        its first round, which includes the prompt."""
        costs, name = self.costs, self.name
        size = max(outcome.drafted for outcome in outcomes)
        # Trees of look-ups take as long as chains of as many nodes.
        levels = size if self._any_tree else max(outcome.depth for outcome in outcomes)
        catching_up = [
            self.num_uncomputed_tokens(request, outcome.emitted)
            for request, outcome in zip(requests, outcomes, strict=True)
            if outcome.drafted and not (self.text(request).drafted or self._needs_no_prefill)
        ]
        unread, steady = sum(catching_up), costs.of(bucket, name, size)
        if begun and not unread:
            costs.add(bucket, name, size, seconds, levels)
        elif begun and (steady is None or steady.measured < MIN_SAMPLES):
            # Its drafting is mostly catching up, but scoring took as long as ever, and that alone
            # may cost more than drafts bring.
            known = costs.prefill_seconds(name, unread, 0.0)
            drafting = max(0.0, seconds.draft - known) if known else 0.0
            costs.add(bucket, name, size, replace(seconds, draft=drafting), levels)
        if unread:
            # A drafter that has to catch up first takes longer than it will the next time.
            costs.add_prefill(name, seconds.draft - (steady.draft if steady else 0.0), unread)

    def grow(self, bucket: BatchBucket) -> None:
        """Grows the trees anew, if they are due."""
        if self._grown is not None and self._grown.due():
            marginal_costs = self.costs.marginal_costs(bucket, self.name, self.nominal.forked)
            self._grown.grow(self.acceptance, marginal_costs)
