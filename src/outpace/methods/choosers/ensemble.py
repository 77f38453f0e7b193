"""Several drafters at once.

precedence: Saxena 2023 and SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) with a model
where the look-up finds nothing. merge: SpecInfer (Miao et al. 2023, arXiv 2305.09781), SpecTr (Sun
et al. 2023, arXiv 2310.15141). vote: Minions (Wang et al. 2024, arXiv 2402.15678), Smurfs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from outpace.core.proposal import DraftSampling, Proposal
from outpace.core.request import PerRequest
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.chains import deterministic_chains
from outpace.draft.token_trees import deterministic_trees, merged
from outpace.methods.choosers.base import (
    ChildProposal,
    Children,
    CompositeDrafter,
    dummy_configs,
    rule_of,
)
from outpace.methods.choosers.choosing import DraftersOptions
from outpace.methods.choosers.joining import side_by_side
from outpace.methods.models.draft_model import DraftModel
from outpace.targets.hf.loading.loaded import LoadedModel

VOTE_MEMORY = 0.9
"""The share of a drafter's weight in votes that is kept in each round; the rest is the share of its
tokens that was accepted."""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(DraftersOptions):
    """What a user may set."""

    method: ClassVar[str] = "ensemble"
    drafters: Any
    """The drafters, in order: each as a speculative_config."""
    combine: Literal["precedence", "merge", "vote"] = "precedence"
    """How: 'precedence' (the first that proposes), 'merge' (one tree of all), 'vote' (the chain
    that most of them agree on)."""


class Ensemble(CompositeDrafter):
    """Several drafters, joined in one of three ways.

    precedence: for each row the first drafter of the list that proposes anything; look-ups should
    come first. merge: one tree of all drafts. Chains that were drawn stand side by side as
    independent draws: from one distribution if the drafters are the same draft model, else each
    from its own, where a fixed token has all the probability. If nothing was drawn, or a drafter
    makes trees, the merged tokens are fixed. vote: the path through the trie of all drafts that has
    most votes, where a drafter's vote weighs the share of its tokens that was accepted lately. That
    is a choice among drawn tokens, so they count as fixed.
    """

    name: ClassVar[str] = "ensemble"
    Options: ClassVar[type[Any]] = EnsembleOptions
    sampling_kinds: frozenset[DraftSampling] = frozenset(
        {DraftSampling.DETERMINISTIC, DraftSampling.IID}
    )

    def __init__(self, given: Children, combine: str, alike: bool = False) -> None:
        """alike: the children draw from the same distribution."""
        super().__init__(given)
        self._combine = combine
        if combine != "precedence":
            self.capabilities = replace(self.capabilities, joins_drafts=True)
            self.trees = combine == "merge"
            self.sampling_kinds = frozenset(
                {self._merges(alike) if self.trees else DraftSampling.DETERMINISTIC}
            )
        self._votes = PerRequest(
            lambda request: [0.5] * len(self.children),
            lasting=True,
            common=[0.5] * len(self.children),
        )
        """What each drafter's vote weighs: the share of its tokens that was accepted lately."""

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        return "recursive" if options.combine == "merge" else rule_of(options.drafters)

    @classmethod
    def build(cls, setup: Setup) -> Ensemble:
        configs = list(setup.options.drafters)
        given = Children.of(setup, configs)
        alike = _of_one_distribution(configs, given.drafters)
        return cls(given, setup.options.combine, alike)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"drafters": dummy_configs(loaded, "ngram", "draft_model")}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        if self._combine == "precedence":
            return self._first(rows, budgets)
        if self._combine == "merge":
            return self._merged(rows, budgets)
        return self._voted(rows, budgets)

    def observe(self, round: Round) -> None:
        round_state = self.round_state(round.rows)
        if self._combine == "vote" and round_state.asked and self.learns:
            for row, outcome in enumerate(round.scored.outcomes):
                weights = self._votes[round.requests[row]]
                for asked in round_state.asked:
                    if nodes := asked.nodes[row]:
                        committed = outcome.tokens
                        said = len(nodes.follow(committed)) / min(len(nodes), len(committed))
                        old = VOTE_MEMORY * weights[asked.child]
                        weights[asked.child] = old + (1 - VOTE_MEMORY) * said
        super().observe(round)

    # -- precedence ----------------------------------------------------------------------------

    def _first(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        asked: list[ChildProposal] = []
        chosen, open_budgets = [0] * len(rows), list(budgets)
        for child in range(len(self.children)):
            asked.append(self.ask(child, rows, open_budgets))
            for row, count in enumerate(asked[-1].counts):
                if count:
                    chosen[row], open_budgets[row] = child, 0
            if not any(open_budgets):
                break
        # A pass of the target's own layers wrote over what an earlier child's had left of them.
        for place, each in enumerate(asked[:-1]):
            asked[place] = replace(each, proposal=replace(each.proposal, precomputed=None))
        return self.join(asked, chosen)

    # -- merge ---------------------------------------------------------------------------------

    def _merges(self, alike: bool) -> DraftSampling:
        """How merged tokens were drawn. Only chains can stand side by side as independent draws;
        anything else makes them fixed."""
        kinds = frozenset().union(*(child.sampling_kinds for child in self.children))
        drawn = [
            child
            for child in self.children
            if child.sampling_kinds != {DraftSampling.DETERMINISTIC}
        ]
        if (
            not drawn
            or not kinds <= {DraftSampling.DETERMINISTIC, DraftSampling.IID}
            or any(c.trees for c in drawn)
        ):
            return DraftSampling.DETERMINISTIC
        return DraftSampling.IID if alike else DraftSampling.PER_DRAFTER

    def _merged(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        asked: list[ChildProposal] = []
        for number in range(len(self.children)):
            left = len(self.children) - number
            # The next drafters may have what one leaves of its share.
            spent = [sum(each.counts[row] for each in asked) for row in range(len(rows))]
            shares = [-(-(b - used) // left) for b, used in zip(budgets, spent, strict=True)]
            asked.append(self.ask(number, rows, shares))
        # A sampled row must get the same whatever else is in the batch. A greedy row, whose tokens
        # are fixed only if all rows are greedy, gets the same text either way.
        chosen = (
            self.sampling_kinds == {DraftSampling.DETERMINISTIC}
            or rows.coupled
            or rows.pipeline.all_greedy
        )
        if not chosen and any(any(each.counts) for each in asked):
            made, counts = [each.proposal for each in asked], [each.counts for each in asked]
            return side_by_side(
                made, counts, self._vocabulary, DraftSampling.PER_DRAFTER in self.sampling_kinds
            )
        trees = [merged(each.nodes[row] for each in asked) for row in range(len(rows))]
        return deterministic_trees(trees, rows.seeds.device)

    # -- vote ----------------------------------------------------------------------------------

    def _voted(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        asked = [self.ask(number, rows, budgets) for number in range(len(self.children))]
        drafts = []
        for row in range(len(rows)):
            weights = self._votes[rows.requests[row]]
            chains = [(each.nodes[row].eldest_chain(), weights[each.child]) for each in asked]
            drafts.append(heaviest(chains))
        return deterministic_chains(drafts, rows.seeds.device)


def heaviest(chains: Sequence[tuple[Sequence[int], float]]) -> list[int]:
    """Returns the path through the trie of some chains that takes, at each node, the child with
    the greatest sum of weights; among equals, that of the first chain.

    >>> heaviest([([1, 2], 0.4), ([1, 3], 0.5), ([4, 4], 0.8)])
    [1, 3]
    """
    path: list[int] = []
    going = [(list(chain), weight) for chain, weight in chains]
    while True:
        votes: dict[int, float] = {}
        for chain, weight in going:
            if len(chain) > len(path):
                votes[chain[len(path)]] = votes.get(chain[len(path)], 0.0) + weight
        if not votes:
            return path
        token = max(votes, key=votes.__getitem__)
        going = [
            (chain, weight)
            for chain, weight in going
            if len(chain) > len(path) and chain[len(path)] == token
        ]
        path.append(token)


def _of_one_distribution(configs: Sequence[Mapping[str, Any]], children: Sequence[Drafter]) -> bool:
    """Whether children draw from the same distribution after the same text: equal draft models
    that do not learn. Two that learn, or that stand for others, come to differ."""
    fixed = all(type(child) is DraftModel for child in children)
    learning = any(config.get("online") is not None for config in configs)
    return fixed and not learning and all(config == configs[0] for config in configs)
