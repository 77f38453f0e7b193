"""Ends the chains of a round where the next token is not expected to repay its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from outpace.core.proposal import DraftingTerms, StoppingFn
from outpace.core.request import Request
from outpace.core.trees.tree_shape import AcceptedRanks, chain_ranks
from outpace.draft.round import Outcome
from outpace.policy.acceptance import COUNT_DECAY, Acceptance, Calibration, Confidences, Counts
from outpace.policy.curves import MIN_SAMPLES


class EarlyStopping:
    """Watches the chains of the rows for which "auto" chooses how much to draft.

    The chance that all tokens of a chain so far are accepted is the product of the tokens' chances,
    which follow from the drafter's probabilities (`Calibration`). One more token in each row is
    expected to bring that chance times the chance of a next token, summed over the rows. It also
    makes the round longer, by its drafting and scoring. Where it brings fewer tokens in that time
    than rounds do on average, the chains of all these rows end: a pass is as wide as its widest
    row, so ending one chain alone would save nothing. The last token that was looked at stays in
    the draft, so that each token follows the distribution that it was drawn from.
    """

    def __init__(self) -> None:
        self._calibration = Calibration(memory=COUNT_DECAY)
        self._next = Counts()  # chances of tokens after an accepted one
        self._going = Acceptance()  # chances that a chain is not ended, by its length
        self._adaptive: Sequence[Request] = ()
        # By length, from 1: the sum of the rows' chances below which chains of it end.
        self._least: Sequence[float] = ()
        self._confidences = Confidences(())
        self._watched: dict[Request, bool] = {}  # in this round: whether its chain was ended

    def new(self) -> Counts:
        """Returns the empty counts of a new request: how far its chains go on."""
        return self._going.new()

    # -- before a round ------------------------------------------------------------------------

    def survival_probs(self, rows: Sequence[Counts], largest: int) -> list[float]:
        """Returns the chance that a chain comes to have 1, 2, ... ``largest`` tokens, if nothing
        else ends it, on average over these rows."""
        reached = [0.0] * largest
        for row in rows:
            goes_on = [chance for (chance,) in self._going.chances(row, largest)]
            chances = accumulate(goes_on, float.__mul__, initial=1.0)
            for index, chance in zip(range(largest), chances, strict=False):
                reached[index] += chance / len(rows)
        return reached

    def begin(self, adaptive: Sequence[Request]) -> None:
        """Begins a round. adaptive: the rows whose chains may be ended; none is, until
        `set_thresholds` says where that pays."""
        self._adaptive, self._least = adaptive, ()

    def set_thresholds(self, rate: float, curve: Sequence[float]) -> None:
        """Sets how likely the chains of the coming round must be, at each length, to go on.

        rate: tokens per second that rounds bring, all rows together. curve: the seconds of a round
        by its size.
        """
        ((chance,),) = self._next.chances(1)
        self._least = [rate * cost / chance for cost in costs_of_one_more(curve)]

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        """Returns the terms of the coming round; `set_thresholds` may be called afterwards, too."""
        self._confidences, self._watched = Confidences(requests), {}
        chances = [self._calibration.chances()] * len(requests)

        def begin(counts: Sequence[int]) -> StoppingFn:
            asked = {
                request: count
                for request, count in zip(requests, counts, strict=True)
                if count and request in self._adaptive
            }
            self._watched |= dict.fromkeys(asked, False)
            live = [request in asked for request in requests]

            def end(length: int) -> None:
                self._watched |= {request: count > length for request, count in asked.items()}

            return self._confidences.watch(counts, chances, self._ending(live, end))

        return replace(terms, make_stopping_fn=begin)

    def _ending(
        self, live: Sequence[bool], end: Callable[[int], None]
    ) -> Callable[[Tensor], Tensor]:
        """Returns what ends the chains of the ``live`` rows. end: takes the length at which."""
        length = 0

        def ends(joint_acceptance: Tensor) -> Tensor:
            nonlocal length
            length += 1
            hope = sum(
                chance for chance, on in zip(joint_acceptance.tolist(), live, strict=True) if on
            )
            if length > len(self._least) or hope >= self._least[length - 1]:
                return torch.zeros_like(joint_acceptance, dtype=torch.bool)
            end(length)
            return torch.tensor(live, device=joint_acceptance.device)

        return ends

    # -- after a round ------------------------------------------------------------------------

    def learn(self, request: Request, own: Counts, outcome: Outcome) -> AcceptedRanks:
        """Learns from what became of a chain, and returns the ranks of its tokens, among which
        the first that was not drafted, because the chain was ended, counts as rejected.

        own: the request's counts, from `new`.
        """
        ranks = chain_ranks(outcome.depth, outcome.accepted)
        ranges = self._confidences.ranges(request, outcome.depth)
        if request not in self._watched or ranges is None:
            return ranks
        self._calibration = self._calibration.with_draft(ranges, outcome.accepted)
        for _, accepted in ranks[1:]:
            self._next.add([(1, accepted)])
        end: AcceptedRanks = [(1, None)] if self._watched[request] else []
        drafted: AcceptedRanks = [(1, 0)] * (outcome.depth - 1)
        self._going.learn(own, [*drafted, *end])
        return [*ranks, *end] if outcome.accepted == outcome.depth else ranks


def costs_of_one_more(curve: Sequence[float]) -> list[float]:
    """Returns how many seconds longer one more token makes a round with 1, 2, ... tokens. Each is a
    mean over neighbouring sizes: single medians are off by as much as a token costs.

    >>> costs_of_one_more([10.0, 12.0, 13.0, 14.0, 18.0])
    [1.0, 2.0, 2.5]
    """
    last = len(curve) - 1
    around = [(max(1, size - 1), min(last, size + MIN_SAMPLES)) for size in range(1, last)]
    return [(curve[high] - curve[low]) / (high - low) for low, high in around]


def expected_seconds(
    curve: Sequence[float], survival_probs: Sequence[float], min_size: int
) -> list[float]:
    """Returns the seconds that a round takes on average, for each number of tokens 0, 1, ... that
    chains may have.

    survival_probs: the chance of each number of tokens 1, 2, ... to be drafted. min_size: tokens
    that some other row drafts in any case.

    >>> expected_seconds([10.0, 12.0, 16.0], survival_probs=[1.0, 0.5], min_size=0)
    [10.0, 12.0, 14.0]
    """
    padded = [curve[max(size, min_size)] for size in range(len(survival_probs) + 1)]
    more = (
        chance * (b - a) for chance, (a, b) in zip(survival_probs, pairwise(padded), strict=True)
    )
    return list(accumulate(more, initial=padded[0]))
