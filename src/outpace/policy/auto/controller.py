"""How much to draft for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

from outpace.core.account import Account, DrafterAccount, Mode, Reason
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import Trail, TreeShape, chain_trail
from outpace.policy.auto.acceptance import PRIOR, Acceptance
from outpace.policy.auto.cost import ENOUGH, CostModel, Place, place_before
from outpace.policy.auto.decision import Decision
from outpace.policy.auto.finds import Finds
from outpace.policy.auto.growing import Growing
from outpace.policy.auto.history import RowHistory
from outpace.policy.auto.knowledge import Knowledge
from outpace.policy.auto.ladder import Ladder
from outpace.policy.auto.ledger import Ledger
from outpace.policy.auto.outlook import Offer, Outlook, Promise
from outpace.policy.auto.prices import Prices
from outpace.policy.auto.repaying import Prospect, repays
from outpace.policy.auto.stopping import Stopping, expected_seconds
from outpace.policy.auto.trials import Aside, Rest, Trial, Trials
from outpace.policy.base import (
    Controller,
    Outcome,
    RoundPlan,
    affordable,
    mode_of,
    wish,
)

FIRST = 4
"""Nodes of the very first draft in all rows together, before anything is known."""

MARGIN = 1.04
"""Drafting must promise this many times the speed of plain decoding. Measurements are off by as
much, and of two equal choices the one that was measured luckily looks better."""

CLOSE = 1.25
"""Where drafting promises less than this, plain rounds are measured now and then, too."""

PLAIN = 2
"""Plain rounds before the first draft at a batch and context: one may have been disturbed."""

Prospects = Callable[[Request], Prospect]


class Auto(Controller):
    """Drafts as much as promises the most tokens per second, by measured times and acceptance.

    For every width w the round is expected to take T(w) seconds, the median of such rounds at this
    batch and context, and to bring 1 + a_1 + a_1 a_2 + ... tokens in each row. All rows get the
    same width, since narrower rows are padded to the widest; a row gets less only where its text is
    about to end.

    Where plain decoding is best a draft is tried now and then (`Trials`). It is tried in one row:
    that shows what a round takes, and the drafter has only one prompt to read. Times differ from
    run to run, and what is drafted changes which random numbers a sampled text meets. So the drafts
    of a row whose text is `reproducible` depend on nothing but its own history (`Ledger`).

    A drafter that stands for others and chooses among them itself is one drafter here.
    """

    def __init__(
        self,
        drafts: Ladder | Growing,
        prices: Prices | None = None,
        prior: float = PRIOR,
        keeps_up: bool = False,
        stops: bool = False,
        name: str = "drafter",
        look_up: bool = False,
    ) -> None:
        """drafts: what to choose from. prices: nominal ones. prior: the chance of a first token
        before anything is known. keeps_up: the drafter never has anything to read before a
        draft. stops: its chains may be ended by how sure it is of its tokens. name, look_up: as in
        its account."""
        self.known = Knowledge(Acceptance(prior))
        self._growing = drafts if isinstance(drafts, Growing) else None
        static = drafts.static if isinstance(drafts, Growing) else drafts
        self._static = self._ladder = static
        self.shape: TreeShape | None = None  # of the present round, if the drafter leaves it open
        self._prices = prices or Prices()
        self._keeps_up = keeps_up
        self._name, self._look_up = name, look_up
        self._loose = self._growing is None and static.shape.is_chain
        self._rows: WeakKeyDictionary[Request, RowHistory] = WeakKeyDictionary()
        self._ours = True  # whether the budget of some row of this round is chosen here
        self._asked: frozenset[Request] = frozenset()  # for which it is asked in this round
        self._trial: Trial | None = None  # of this round
        self._rest: Rest | None = None
        self._promising = False  # whether drafting promises more than plain decoding
        self.promise: Promise | None = None  # of drafting, when that was last looked at
        self._decision = Decision()  # the latest
        self.finds = Finds()
        self._lessons = 0  # how often something was learned of acceptance
        self._stopping = Stopping() if stops else None
        self._trials, self._aside = Trials(), Aside()

    @property
    def costs(self) -> CostModel:
        """How long rounds take."""
        return self.known.costs

    @property
    def acceptance(self) -> Acceptance:
        """How likely drafts are to be accepted."""
        return self.known.acceptance

    @property
    def _slim(self) -> float:
        """Levels per node of drafts whose shape is not known beforehand; 1 where the ladder's own
        shape says it."""
        return self.known.slimness.levels_per_node if self._loose else 1.0

    # -- choosing ------------------------------------------------------------------------------

    def plan(self, requests: Sequence[Request], terms: DraftingTerms) -> RoundPlan:
        return RoundPlan(self.budgets(requests), self.terms(requests, terms), self.shape)

    def begin(self, request: Request, known: Mapping[str, int]) -> None:
        self._row(request).begin(min(known.values(), default=0))

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        """Returns how many nodes to draft for each request."""
        fixed = [self._fixed(request) for request in requests]
        free = [request for request, count in zip(requests, fixed, strict=True) if count is None]
        floor = max((count for count in fixed if count is not None), default=0)
        offer = self.choose(requests, free, floor)
        self.adopt(offer)
        chosen = iter(offer.widths)
        budgets = [next(chosen) if count is None else count for count in fixed]
        within = zip(requests, affordable(requests, budgets), strict=True)
        self._asked = frozenset(request for request, budget in within if budget)
        return budgets

    def choose(
        self,
        requests: Sequence[Request],
        free: Sequence[Request],
        floor: int = 0,
        prospects: Prospects | None = None,
    ) -> Offer:
        """Returns an offer: how many nodes to draft in each of the ``free`` ones of all rows. A
        trial in it counts once the offer is taken (`adopt`).

        floor: nodes that some other row drafts. prospects: what drafting brings in the rest of a
        row's text, with others that draft; unset: what follows from what it promises now.
        """
        self.prepare(requests)
        self._trial, self._ours = None, bool(free)
        self._promising = self._promising and self._ours
        if self._stopping is not None:
            self._stopping.begin(free)
        if not free:
            return Offer(())
        width, trial = self._width(requests, free, floor, prospects)
        trying = self._scout(free) if trial else None
        return Offer([width if trying in (None, request) else 0 for request in free], trial)

    def adopt(self, offer: Offer) -> None:
        """Learns that an offer is taken."""
        self._trial = offer.trial
        if offer.trial is not None:
            offer.trial.made()

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        """Returns the rule's terms with what ends this round's chains, if anything does."""
        return terms if self._stopping is None else self._stopping.terms(requests, terms)

    def prepare(self, requests: Sequence[Request]) -> TreeShape | None:
        """Returns the tree that the coming round's drafts are parts of, if the drafter leaves it
        open."""
        if self._growing is not None:
            # All rows draft parts of one tree. For a seeded text it must not depend on what was
            # learned.
            learned = not any(request.reproducible for request in requests)
            self._ladder = self._growing.learned if learned else self._static
            self.shape = self._ladder.shape
        return self.shape

    @property
    def most(self) -> int:
        """Nodes of the largest draft to choose from."""
        return self._ladder.widths[-1]

    def expected(
        self, requests: Sequence[Request], free: Sequence[Request], nodes: Sequence[int]
    ) -> tuple[float, float] | None:
        """Returns the tokens that n nodes in each of the ``free`` rows are expected to bring
        in these, and the seconds of such a round; None while nothing is known of these."""
        place = Place.of(len(requests), max(request.length for request in requests))
        curve = self.costs.curve(place, self._ladder.heights(max(nodes)))
        if curve is None:
            return None
        tokens = [self.tokens(request, count) for request, count in zip(free, nodes, strict=True)]
        return sum(tokens), self._seconds(free, curve, max(nodes))[max(nodes)]

    def tokens(self, request: Request, nodes: int) -> float:
        """Returns the tokens that a round with n nodes is expected to bring a request."""
        found = self._expected_of(request)
        return max((found[width] for width in found if width <= nodes), default=1.0)

    def ledger(self, request: Request) -> Ledger:
        """Returns the ledger of a request: what it drafts by its own history alone."""
        return self._row(request).ledger

    def learn(self, request: Request, trail: Trail) -> None:
        """Learns what would have become of a draft that was not played."""
        self.acceptance.learn(self._row(request).counts, trail)
        self._lessons += 1

    def _scout(self, free: Sequence[Request]) -> Request:
        """The row in which it costs least to try a draft."""
        return min(free, key=self._unread)

    def _unread(self, row: Request, since: int = 0) -> int:
        """Tokens that the drafter has to read before it can draft for a row, as that was so many
        tokens ago."""
        return 0 if self._keeps_up else self._row(row).unread(row.length - since)

    def _fixed(self, request: Request) -> int | None:
        """A row's own budget, whatever the others do; None if this controller chooses it."""
        wished = wish(request)
        if wished is not None:
            return wished
        if not request.reproducible:
            return None
        return self._row(request).ledger.width(request.remaining)

    def _at_most(self, nodes: int) -> int:
        """The widest draft of at most n nodes, or the narrowest there is."""
        widths = self._ladder.widths
        return max(width for width in widths if width <= max(nodes, widths[1]))

    def _width(
        self,
        requests: Sequence[Request],
        free: Sequence[Request],
        floor: int,
        prospects: Prospects | None,
    ) -> tuple[int, Trial | None]:
        """The width of the coming drafts, and the trial that they are, if they are one."""
        place = Place.of(len(requests), max(request.length for request in requests))
        if self._rest is not None and self._rest.lasts(place, free):
            return 0, None
        self._rest, self._promising, self.promise = None, False, None
        plain = self.costs.measured(place).get(0)
        if plain is None or self.costs.times_measured(place, 0) < PLAIN:
            if self._decision.reason is None:
                self._decision = Decision(Reason.UNMEASURED)
            return 0, None  # all others are measured against it
        scout = self._scout(free)
        reading = self.known.reading.seconds(self._unread(scout), plain)
        # A find has to pay for the rounds before it in which asking brought nothing.
        asking = self.known.finding.misses_per_find * self.costs.miss(place)
        outlook = self._outlook(requests, free, place, floor, asking)
        if outlook is None:
            self._decision = Decision(Reason.UNTRIED, reading=reading / plain)
            return self._try(self._at_most(FIRST // len(requests)), Trial(reading / plain), plain)
        best, drafted = outlook.best, outlook.drafted
        self.promise = Promise(drafted, outlook.seconds[drafted], outlook.curve, plain)
        self._promising = best > 0 and outlook.gain > MARGIN
        repaid = self._promising and self._repays(requests, free, outlook.gain, plain, prospects)
        self._decision = self._decided(self.promise, repaid, reading / plain)
        if repaid:
            # Chains that are ended are no longer than pays, however long they might be.
            chosen = best if self._stopping is None else outlook.widest
            return self._aside.choose(chosen, self._beside(outlook), self.costs, place), None
        # One token would say nothing of when chains are ended.
        few = 1 if self._stopping is None else min(FIRST, outlook.widest)
        narrow = self._at_most(few)
        more = (outlook.tokens[narrow] / outlook.tokens[0] - 1) / len(free)
        longer = outlook.seconds[narrow] - plain + reading + asking
        bearer = self._row(scout) if reading else None
        found = self._try(narrow, Trial(max(0.0, longer / plain - more), bearer), plain)
        self._rest = None if found[1] else Rest(place, WeakSet(free))
        return found

    def _decided(self, promise: Promise, repaid: bool, reading: float) -> Decision:
        """Why drafts are made or not. reading: plain rounds that it takes."""
        if not self._promising:
            return Decision(Reason.NO_GAIN, promise.cost)
        return Decision(Reason.GAIN if repaid else Reason.READING, promise.cost, reading)

    def _outlook(
        self,
        requests: Sequence[Request],
        free: Sequence[Request],
        place: Place,
        floor: int,
        asking: float,
    ) -> Outlook | None:
        """What the widths promise that are near those that were measured; None while nothing is
        known of a round's time. asking: seconds that a find costs besides."""
        widths = self._ladder.widths
        curve = self.costs.curve(place, self._ladder.heights(max(floor, widths[-1])))
        if curve is None:
            return None
        # No leap to where the machine may be another: a kernel's limit, a full cache.
        widest = max(widths[1], 2 * self.costs.widest(place))
        near = [width for width in widths if width <= widest]
        tokens, takes = self._tokens(free), self._seconds(free, curve, near[-1], floor)
        seconds = {width: takes[width] for width in near}
        # Rows whose budget is not chosen here bring the same whatever is chosen.
        others = len(requests) - len(free)
        rates = {w: (others + tokens[w]) / (seconds[w] + asking * (w > 0)) for w in near}
        outlook = Outlook(tokens, curve, seconds, rates)
        if self._stopping is not None:
            self._stopping.plan(rates[outlook.best], curve)
        return outlook

    def _beside(self, outlook: Outlook) -> list[int]:
        """The widths beside the best one that are to be looked at now and then. Where chains are
        ended, their width says nothing that is not known."""
        widths, at = self._ladder.widths, self._ladder.widths.index(outlook.best)
        beside = list(widths[max(0, at - 1) : at + 2]) if self._stopping is None else []
        return [*beside, *[0] * (outlook.gain < CLOSE)]

    def _repays(
        self,
        requests: Sequence[Request],
        free: Sequence[Request],
        gain: float,
        plain: float,
        prospects: Prospects | None,
    ) -> bool:
        """Whether drafting is expected to repay what has to be read for it. gain: of drafting, over
        plain decoding. plain: seconds of such a round. prospects: as in `choose`."""
        unread = sum(map(self._unread, free))
        if not unread:
            return True
        # Where nothing else drafts, little is lost by a text that ends early.
        alone = (Prospect(request.remaining, 1 - 1 / gain) for request in free)
        found = alone if prospects is None else map(prospects, free)
        longest = self.known.spells.typical
        near = [replace(each, ahead=min(longest, each.ahead)) for each in found]
        reading = self.known.reading.seconds(unread, plain)
        return repays(reading / plain * len(requests), near)

    def _seconds(
        self, free: Sequence[Request], curve: Sequence[float], widest: int, floor: int = 0
    ) -> list[float]:
        """The seconds that a round is expected to take, for each width up to this one."""
        if self._stopping is None:
            return [curve[max(width, floor)] for width in range(widest + 1)]
        reach = self._stopping.reach([self._row(request).going for request in free], widest)
        return expected_seconds(curve, reach, floor)

    def _tokens(self, free: Sequence[Request]) -> dict[int, float]:
        """What each width is expected to bring in all free rows together. Where a drafter finds
        something for some of the rows only, the others get the one token of every round."""
        ladder, share = self._ladder, self.known.finding.share
        totals = dict.fromkeys(ladder.widths, 0.0)
        for request in free:
            for width, tokens in self._expected_of(request).items():
                totals[width] += 1 + share * (tokens - 1)
        return totals

    def _expected_of(self, request: Request) -> Mapping[int, float]:
        """What each width is expected to bring a request. It stays what it was while nothing is
        learned, as in plain rounds, which must not take longer for asking again."""
        row, ladder = self._row(request), self._ladder
        height = ladder.shape.height
        found = self.finds.chances(request)
        if found is not None:
            chances = [[chance] for chance in [*found, *[0.0] * height][:height]]
            return ladder.tokens(chances, request.remaining - 1)
        known = (ladder, self._lessons, self._slim, min(request.remaining - 1, height))
        if row.expected is None or row.expected[0] != known:
            chances = self.acceptance.chances(row.counts, height, ladder.shape.most_siblings)
            row.expected = known, ladder.tokens(chances, request.remaining - 1, self._slim)
        return row.expected[1]

    def _try(self, width: int, trial: Trial, plain: float) -> tuple[int, Trial | None]:
        """The width and the trial, if it is allowed; else nothing is drafted."""
        return (width, trial) if self._trials.allowed(trial, plain) else (0, None)

    # -- learning ------------------------------------------------------------------------------

    def record(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds | None
    ) -> None:
        if seconds is not None:
            self._learn_times(requests, outcomes, seconds)
        asked, self._asked, self._trial = self._asked, frozenset(), None
        if self._growing is not None and self._growing.due():
            slopes = self.costs.slopes(place_before(requests, outcomes), self._prices.forked)
            self._growing.grow(self.acceptance, slopes)
        for request, outcome in zip(requests, outcomes, strict=True):
            row = self._row(request)
            row.begun, row.drafted = True, outcome.drafted > 0
            row.rounds += 1
            # Nothing is decided about a last token, which needs no draft.
            chosen = mode_of(request) is Mode.MEASURED
            decided = chosen and request.remaining + outcome.emitted > 1
            row.tally.score(outcome, self._decision.reason if decided else None)
            if request in asked:
                row.tally.ask(found=outcome.drafted > 0)
            row.watch(self.known.spells, self._promising, outcome.emitted, request.finished)
            if outcome.drafted:
                row.read = request.length
            row.ledger.enter(outcome.drafted, outcome.depth, outcome.emitted)
            if outcome.drafted and self._loose:
                self.known.slimness.add(outcome.drafted, outcome.depth)
            # Of a text that has ended, part of the draft was cut off and says nothing.
            if outcome.depth and not request.finished:
                self.learn(request, self._trail(request, outcome))

    def _learn_times(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome], seconds: Seconds
    ) -> None:
        costs, place = self.costs, place_before(requests, outcomes)
        width = max(outcome.drafted for outcome in outcomes)
        # A look-up takes no longer for a tree of more levels.
        levels = width if self._loose else max(outcome.depth for outcome in outcomes)
        begun = all(self._row(request).begun for request in requests)
        behind = [
            self._unread(request, outcome.emitted)
            for request, outcome in zip(requests, outcomes, strict=True)
            if outcome.drafted and not (self._row(request).drafted or self._keeps_up)
        ]
        unread = sum(behind)
        # A drafter that has to catch up first takes longer than it will the next time.
        steady = costs.split(place, width) if unread else None
        trusted = costs.times_measured(place, width) >= ENOUGH
        if begun and not behind:
            found = sum(outcome.drafted > 0 for outcome in outcomes)
            self._add_round(place, width, seconds, levels, found)
        elif begun and not trusted:
            # Even if drafting took no time at all, scoring may already cost more than it brings.
            drafting = self.known.reading.besides(seconds.draft, unread)
            costs.add(place, width, replace(seconds, draft=drafting), levels)
        if unread:
            self.known.reading.add(seconds.draft - (steady.draft if steady else 0.0), unread)
        self._trials.spend(seconds.total if self._ours else 0.0)
        plain = costs.measured(place).get(0)
        if self._trial and (width or self._asked) and plain is not None:
            more = sum(outcome.emitted for outcome in outcomes) / len(outcomes) - 1
            # Plain rounds that were slow just before do not make the time of drafting disappear.
            self._trials.enter(max(seconds.total - plain, seconds.draft), plain, more)

    def _add_round(
        self, place: Place, width: int, seconds: Seconds, levels: int, found: int
    ) -> None:
        """Enters what a round took. found: rows with a draft."""
        if self._asked:
            self.known.finding.add(found, len(self._asked))
        if self._asked and not width:
            self.costs.add_miss(place, seconds)
        else:
            self.costs.add(place, width, seconds, levels)

    # -- telling -------------------------------------------------------------------------------

    def account(self, request: Request) -> Account:
        mode = mode_of(request)
        drafters = () if mode is Mode.OFF else (self.drafter_account(request),)
        return Account(mode, self._row(request).rounds, drafters)

    def drafter_account(self, request: Request, asked: bool = True) -> DrafterAccount:
        """Returns what came of the drafter in a request's text. asked: whether it was a candidate
        in this text."""
        row, mode = self._row(request), mode_of(request)
        decision, chance = Decision(), None
        if asked and mode is Mode.MEASURED:
            decision = replace(self._decision, reason=None)
            if self.acceptance.tried:
                chance = self.acceptance.chances(row.counts, 1)[0][0]
        elif asked and mode is Mode.NOMINAL:
            decision = row.ledger.decision()
            if row.counts.tried:
                chance = row.counts.chances(1)[0][0]
        known = {"look_up": self._look_up, "chance": chance, **vars(decision)}
        return row.tally.account(self._name, **known)

    def note_find(self, request: Request, found: bool) -> None:
        """Learns that the drafter was asked by somebody else, and whether it had a draft."""
        self._row(request).tally.ask(found)

    def _trail(self, request: Request, outcome: Outcome) -> Trail:
        if self._stopping is not None:
            return self._stopping.learn(request, self._row(request).going, outcome)
        shape = self._ladder.shape
        if shape.is_chain:
            return chain_trail(outcome.depth, outcome.accepted)
        return shape.first(outcome.drafted).trail(outcome.path)

    def _row(self, request: Request) -> RowHistory:
        row = self._rows.get(request)
        if row is None:
            counts = self.acceptance.new()
            ledger = Ledger(self._static, self._prices, counts)
            going = counts if self._stopping is None else self._stopping.new()
            row = self._rows[request] = RowHistory(counts, ledger, going)
        return row
