"""The base class of composite drafters, which stand for several child drafters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.config import SpeculativeConfig
from outpace.core.proposal import (
    AuxTokens,
    Capabilities,
    Deterministic,
    DraftSampling,
    Needs,
    Proposal,
    Verdict,
)
from outpace.core.request import Request
from outpace.core.values import shown
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.chains import deterministic_chains
from outpace.draft.fingerprint import digest_of
from outpace.draft.registry import find_drafter
from outpace.draft.state import StateFile
from outpace.draft.token_trees import TokenTree, token_trees_of
from outpace.errors import ConfigError
from outpace.methods.choosers.joining import row_by_row
from outpace.methods.models.loading import OF_LOADING
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True, eq=False)
class ChildProposal:
    """What one child proposed in the present round."""

    child: int
    proposal: Proposal
    nodes: list[TokenTree]  # by row

    @property
    def counts(self) -> list[int]:
        """Nodes of each row."""
        return [len(row) for row in self.nodes]


@dataclass
class CompositeRound:
    """What children were asked in one round."""

    asked: list[ChildProposal] = field(default_factory=list)
    """The proposals of the children that proposed anything."""
    aux_tokens: dict[int, AuxTokens | None] = field(default_factory=dict)
    """The auxiliary tokens of each child that was asked, by its number."""
    found: Sequence[ChildProposal] = ()
    """What look-ups found before a child was chosen."""
    budgets: Sequence[int] = ()
    """How much each row may draft; empty where nothing is drafted."""
    chosen: Sequence[int] = ()
    """By row, the number of the child that drafts; empty where none is chosen."""
    wanted: Sequence[Sequence[int]] = ()
    """By child, how much it drafts in each row, whether or not that is scored."""

    def of(self, child: int) -> ChildProposal | None:
        """Returns what a child proposed, if it proposed anything."""
        return next((each for each in reversed(self.asked) if each.child == child), None)


TO_LOAD = frozenset({*OF_LOADING, "tokenizer", "processor"})
"""Options of a draft model that matter only for loading it."""


@dataclass(frozen=True, eq=False)
class Children:
    """The drafters that one stands for."""

    drafters: Sequence[Drafter]
    names: Sequence[str]
    """Their names, as `Proposal.methods` will say."""
    target: LoadedModel

    @classmethod
    def of(cls, setup: Setup, configs: Sequence[Mapping[str, Any]]) -> Children:
        """Returns a drafter for each config, named by its method, and numbered where several have
        the same. One model that is named twice is loaded once."""
        drafters: list[Drafter] = []
        for number, config in enumerate(configs):
            earlier = next((at for at in range(number) if configs[at] == config), None)
            loaded = drafters[earlier].loaded if earlier is not None else None
            if loaded is not None and "model" in config:
                kept = {name: value for name, value in config.items() if name not in TO_LOAD}
                config = {**kept, "model": loaded}
            drafters.append(setup.child(config))
        methods = [SpeculativeConfig.of_child(config).method for config in configs]
        counted = [f"{name} {methods[:n].count(name) + 1}" for n, name in enumerate(methods)]
        pairs = zip(methods, counted, strict=True)
        names = [one if methods.count(one) == 1 else numbered for one, numbered in pairs]
        return cls(drafters, names, setup.loaded)

    def state_file(self, path: str | os.PathLike[str], method: str) -> StateFile:
        """Returns the file in which a method keeps what it learns about them. It names target and
        drafters, because what was learned holds for these only."""
        whose = [
            name if one.loaded is None else f"{name} of {Path(one.loaded.name).name}"
            for name, one in zip(self.names, self.drafters, strict=True)
        ]
        networks = [network for one in self.drafters for network in one.networks()]
        digests = [digest_of(network) for network in (self.target.model, *networks)]
        return StateFile(path, method, whose, digests)


class CompositeDrafter(Drafter):
    """A drafter that stands for others, its children.

    Each child draws from a random stream of its own, sees every committed token, and observes every
    round as if its own proposal had been scored. Different children may draft for the rows of one
    round. Where any child samples, trees of fixed tokens are cut to their first chain: fixed
    siblings do not share a distribution, as drawn ones do. A child that samples keeps its trees
    where all its tokens are fixed, in batches that are greedy or coupled.
    """

    def __init__(self, given: Children) -> None:
        children = self.children = list(given.drafters)
        self.names, self._vocabulary = list(given.names), given.target.vocabulary
        kinds = frozenset().union(*(child.sampling_kinds for child in children))
        if DraftSampling.WITHOUT_REPLACEMENT in kinds and kinds & {
            DraftSampling.IID,
            DraftSampling.PER_DRAFTER,
        }:
            if any(
                child.trees
                and child.sampling_kinds & {DraftSampling.IID, DraftSampling.PER_DRAFTER}
                for child in children
            ):
                raise ConfigError(
                    "one of the drafters draws siblings with replacement and another one without: "
                    "choose one of the two for all."
                )
            kinds -= {DraftSampling.IID}  # a chain has no siblings, and is drawn either way
        self.sampling_kinds = kinds
        self._samples = kinds != {DraftSampling.DETERMINISTIC}
        self.trees = any(self._makes_trees(child) for child in children)
        layers = sorted({layer for child in children for layer in child.needs.hidden_layers})
        softmax_probs = any(child.needs.softmax_probs for child in children)
        images = any(child.needs.images for child in children)
        full_prefill = any(child.needs.full_prefill for child in children)
        self.needs = Needs(tuple(layers), softmax_probs, images, full_prefill)
        self.max_draft_tokens = max(child.max_draft_tokens for child in children)
        own = {id(child.loaded.model if child.loaded else child): child for child in children}
        self.weight_bytes = sum(child.weight_bytes for child in own.values())
        self.pass_bytes = max(child.pass_bytes for child in children)
        self.aux_per_row = max(child.aux_per_row for child in children)
        can = [child.capabilities for child in children]
        readers = [child.capabilities for child in children if child.needs.hidden_layers]
        self.capabilities = Capabilities(
            supports_early_stop=any(one.supports_early_stop for one in can),
            uses_aux_tokens=any(one.uses_aux_tokens for one in can),
            joins_drafts=any(one.joins_drafts for one in can),
            copies_prompts=bool(layers) and all(one.copies_prompts for one in readers),
            takes_predictions=any(one.takes_predictions for one in can),
        )
        self.loaded = next((child.loaded for child in children if child.loaded), None)
        self.target_module = next(
            (child.target_module for child in children if child.target_module), ""
        )

    def _makes_trees(self, child: Drafter) -> bool:
        return child.trees and not (
            self._samples and child.sampling_kinds == {DraftSampling.DETERMINISTIC}
        )

    @property
    def nbytes(self) -> int:
        caches = sum(child.nbytes - child.weight_bytes for child in self.children)
        return self.weight_bytes + caches

    @property
    def compile_seconds(self) -> float:
        return sum(child.compile_seconds for child in self.children)

    # -- rows ----------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        for child in self.children:
            child.check(request)

    def cached_prefix(self, request: Request) -> int:
        return min(child.cached_prefix(request) for child in self.children)

    def begin(self, requests: Sequence[Request]) -> None:
        for child in self.children:
            child.begin(requests)

    def computed_tokens(self, request: Request) -> Mapping[str, int]:
        known = [child.computed_tokens(request).values() for child in self.children]
        return {name: min(own, default=0) for name, own in zip(self.names, known, strict=True)}

    def networks(self) -> Iterator[nn.Module]:
        for child in self.children:
            yield from child.networks()

    def drafters_to_verify(self) -> Iterator[Drafter]:
        for child in self.children:
            yield from child.drafters_to_verify()

    def learners(self) -> Iterator[Drafter]:
        for child in self.children:
            yield from child.learners()

    def set_learning(self, learns: bool) -> None:
        super().set_learning(learns)
        for child in self.children:
            child.set_learning(learns)

    def files(self) -> Iterator[StateFile]:
        yield from super().files()
        for child in self.children:
            yield from child.files()

    def save(self, folder: Path) -> None:
        """Saves the child that learns online. If none does, saves the look-up that can be saved."""
        pairs = list(zip(self.names, self.children, strict=True))
        found = [(name, one) for name, child in pairs for one in child.learners()]
        found = found or [(name, child) for name, child in pairs if child.capabilities.saves]
        if not found:
            super().save(folder)
        elif len(found) == 1:
            found[0][1].save(folder)
        else:
            names = ", ".join(name for name, _ in found)
            raise ConfigError(
                f"several drafters of method {self.name!r} learn ({names}), and a folder holds "
                "one: leave 'online' out of all but one, or all look-ups but one."
            )

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        for child in self.children:
            child.end(requests, interrupted)

    def forget_texts(self) -> None:
        for child in self.children:
            child.forget_texts()

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        layers = self.needs.hidden_layers
        parts = dict(zip(layers, states.chunk(len(layers), -1), strict=True))
        for child in self.children:
            if child.needs.hidden_layers:
                own = torch.cat([parts[layer] for layer in child.needs.hidden_layers], -1)
                child.read(requests, tokens, own)

    # -- rounds --------------------------------------------------------------------------------

    def round_state(self, rows: Rows) -> CompositeRound:
        """Returns what children were asked in this round so far."""
        round_state: CompositeRound = rows.state.setdefault(self, CompositeRound())
        return round_state

    def ask(self, child: int, rows: Rows, budgets: Sequence[int]) -> ChildProposal:
        """Returns what a child proposes, and keeps it until the round is over."""
        made, nodes = self.propose_child(child, rows, budgets)
        asked, round_state = ChildProposal(child, made, nodes), self.round_state(rows)
        round_state.aux_tokens[child] = made.aux_tokens
        if any(asked.counts):
            round_state.asked.append(asked)
        return asked

    def propose_child(
        self, child: int, rows: Rows, budgets: Sequence[int]
    ) -> tuple[Proposal, list[TokenTree]]:
        """Returns what a child proposes, and its nodes by row.

        Auxiliary tokens join the target's pass only if one child drafts in all rows. So a child
        that needs them drafts nothing in reproducible rows, whose drafts must not depend on the
        others.
        """
        if self.children[child].aux_per_node:
            budgets = rows.without_reproducible(budgets)
        if any(budgets):
            with rows.pipeline.drafting():  # what one child lacks, another one may have
                made = (
                    self.children[child]
                    .propose(rows, budgets)
                    .cut_to_vocabulary_(rows.pipeline.vocabulary)
                )
        else:
            made = Proposal.empty(len(rows), rows.seeds.device)
        nodes = token_trees_of(made)
        with_drawn = self._samples and not (rows.coupled or rows.pipeline.all_greedy)
        guessed = self._samples and self.children[child].sampling_kinds == {
            DraftSampling.DETERMINISTIC
        }
        fixed = isinstance(made.distribution, Deterministic) and not made.tree.is_chain
        if fixed and (guessed or with_drawn):
            chains = deterministic_chains([row.eldest_chain() for row in nodes], rows.seeds.device)
            made = replace(chains, predicted=made.predicted)
            nodes = token_trees_of(made)
        return made, nodes

    def join(self, asked: Sequence[ChildProposal], chosen: Sequence[int]) -> Proposal:
        """Returns one proposal that has each row from one child. chosen: places in ``asked``, by
        row."""
        made = row_by_row([each.proposal for each in asked], chosen, self._vocabulary)
        names = tuple(self.names[asked[which].child] for which in chosen)
        return replace(made, methods=names)

    def observe(self, round: Round) -> None:
        round_state = self.round_state(round.rows)
        for number, child in enumerate(self.children):
            own = round_state.of(number)
            if own is None or own.proposal.tokens is round.proposal.tokens:
                rode = round_state.aux_tokens.get(number) is round.proposal.aux_tokens
                child.observe(round if rode else replace(round, aux_logits=None))
            else:
                child.observe(_as_its_own(own, round))


def _as_its_own(asked: ChildProposal, round: Round) -> Round:
    """The round as if the child's proposal had been scored: its tokens count as accepted as far as
    they are the committed ones. The target's distributions are in the round that was run."""
    outcomes = [
        replace(
            outcome,
            drafted=len(nodes),
            depth=nodes.height,
            path=(path := nodes.follow(outcome.tokens[:-1])),
            accepted=min(len(path), outcome.emitted),
        )
        for nodes, outcome in zip(asked.nodes, round.scored.outcomes, strict=True)
    ]
    ends = [outcome.path[-1] if outcome.path else 0 for outcome in outcomes]
    following = [outcome.tokens[len(outcome.path)] for outcome in outcomes]
    like = round.verdict.node
    verdict = Verdict(like.new_tensor(ends), like.new_tensor(following), ends)
    rode = asked.proposal.aux_tokens is round.proposal.aux_tokens
    return replace(
        round,
        proposal=asked.proposal,
        verdict=verdict,
        outcomes=outcomes,
        softmax_probs=None,
        aux_logits=round.aux_logits if rode else None,
        scored_as=round.scored,
    )


# -- children from options -------------------------------------------------------------------------


def check_look_up(option: str, drafter: Drafter) -> None:
    """Raises ``ConfigError`` where an option names a drafter as a look-up that is none: it needs
    passes of its own, or auxiliary tokens in the target's."""
    if drafter.pass_bytes:
        raise ConfigError(
            f"{option} cannot be {drafter.name!r}, which runs a model: choose a look-up."
        )
    if drafter.capabilities.uses_aux_tokens:
        raise ConfigError(
            f"{option} cannot be {drafter.name!r}, which drafts inside the target's own pass: "
            "choose a look-up, or use it as the method."
        )


def check_configs(method: str, name: str, given: Any, least: int = 1) -> None:
    """Raises ``ConfigError`` unless an option is a list of drafters, each as speculative_config."""
    listed = list(given) if isinstance(given, (list, tuple)) else []
    if len(listed) < least or not all(isinstance(config, Mapping) for config in listed):
        raise ConfigError(
            f"{name} must list {'one drafter' if least == 1 else 'two drafters'} or more for "
            f"method {method!r}, such as [{{'method': 'ngram'}}, {{'model': 'a/draft/model'}}], "
            f"not {shown(given)}."
        )
    for config in listed:
        check_config(method, config)


def check_config(method: str, config: Any) -> SpeculativeConfig:
    """Returns a child's config; ``ConfigError`` for a mistake in it, before anything is loaded."""
    wanted = SpeculativeConfig.of_child(config)
    for key in ("verify", "length"):
        if getattr(wanted, key) is not None:
            raise ConfigError(
                f"{key!r} cannot be set for one drafter of method {method!r}: set it for all "
                "of them, outside that drafter."
            )
    if "num_speculative_tokens" in config:
        raise ConfigError(
            f"'num_speculative_tokens' cannot be set for one drafter of method {method!r}: set it "
            "for all of them, outside that drafter."
        )
    find_drafter(wanted.method).configure(wanted.options)
    return wanted


def rule_of(configs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rule for drafters that take turns: one that takes trees if any of them makes
    trees. If all drafts are fixed, "match" takes them all and accepts as much as any rule."""
    wanted = (SpeculativeConfig.of_child(config) for config in configs)
    kinds = [(find_drafter(each.method), each) for each in wanted]
    rules = [kind.default_rule_for(kind.configure(each.options)) for kind, each in kinds]
    if "recursive" in rules:
        return "recursive"
    fixed = all(
        rule == "match" or kind.sampling_kinds == {DraftSampling.DETERMINISTIC}
        for rule, (kind, _) in zip(rules, kinds, strict=True)
    )
    return "match" if fixed and "match" in rules else "token"


def dummy_configs(loaded: LoadedModel, *methods: str) -> list[dict[str, Any]]:
    """Returns configs of tiny instances of these drafters, for gate and contract tests."""
    return [{"method": name, **find_drafter(name).dummy_options(loaded)} for name in methods]
