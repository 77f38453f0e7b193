"""Ways of drafting for the distribution gate: all proposals that each can make, and their
probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.audit.gate.world import World
from outpace.core.proposal import Deterministic, DraftDistribution, DraftingTerms, Sampled
from outpace.heads.base import TargetShape
from outpace.heads.classifiers import Classifier, ClassifierConfig, ModelSignature
from outpace.policy.lengths.base import LengthPolicy
from outpace.policy.lengths.registry import find_length, length_options

SURE = 0.6
"""Chains that end by themselves go on while the drafter's most probable token has at least this
probability."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """The R proposals of N nodes that a drafter can make to each of G pairs of models."""

    tokens: Tensor  # [R, N]
    chance: Tensor  # [G, R], the probability of each proposal; 1 if ``each`` is set
    distribution: DraftDistribution
    """The drafter's claim about its tokens; its q is [G * R, N, V], by pair, then proposal."""
    each: bool = False
    """Whether a rule must be exact for each proposal by itself, as for tokens that were not drawn,
    and not only on average over the proposals."""
    counts: Tensor | None = None  # [G, R] or [R] drafted nodes, where the drafter itself decides


Drafting = Callable[[World, list[int]], Drafts]
"""A way of drafting: from a world and the parents of a tree's nodes (as in `Tree.uniform`) to all
proposals."""


def point(world: World, parents: list[int]) -> Drafts:
    """Returns all proposals, or 27 of them if there are more, as tokens that were not drawn."""
    tokens = _all_tokens(world.vocabulary, len(parents))
    tokens = tokens[torch.linspace(0, len(tokens) - 1, min(27, len(tokens))).long()]
    return Drafts(tokens, torch.ones(world.pairs, len(tokens)).double(), Deterministic(), each=True)


def iid(world: World, parents: list[int]) -> Drafts:
    """Returns all proposals, each token drawn from q at its parent."""
    tokens = _all_tokens(world.vocabulary, len(parents))
    q = probs_at_parents(world, tokens, parents)  # [G, R, N, V]
    drawn = q.gather(-1, tokens[None, :, :, None].expand(*q.shape[:-1], 1))[..., 0]
    return Drafts(tokens, drawn.prod(-1), Sampled(q.flatten(0, 1)))


def without(world: World, parents: list[int]) -> Drafts:
    """Returns all proposals, siblings drawn without replacement.

    Once q has no token left, further siblings repeat the token of the first one. Such nodes were
    not drawn from anything, and a rule must not accept them.
    """
    tokens = _all_tokens(world.vocabulary, len(parents))
    q = probs_at_parents(world, tokens, parents)
    chance = torch.ones(world.pairs, len(tokens)).double()
    for node, parent in enumerate(parents):
        left = q[:, :, node].clone()  # [G, R, V]
        for elder in range(node):
            if parents[elder] == parent:
                left.scatter_(-1, _each(tokens[:, elder], left), 0.0)
        total = left.sum(-1)
        drawn = left.gather(-1, _each(tokens[:, node], left))[..., 0] / total.clamp(min=1e-300)
        eldest = tokens[:, parents.index(parent)]
        chance = chance * torch.where(total > 0, drawn, (tokens[:, node] == eldest).double())
    return Drafts(tokens, chance, Sampled(q.flatten(0, 1), with_replacement=False))


def several(world: World, parents: list[int]) -> Drafts:
    """Returns all proposals, siblings drawn independently, each from a distribution of its own."""
    tokens = _all_tokens(world.vocabulary, len(parents))
    q = probs_at_parents(world, tokens, parents)  # [G, R, N, V]
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    every = of_siblings(q, max(ranks) + 1)
    q = torch.stack([every[rank, :, :, node] for node, rank in enumerate(ranks)], 2)
    drawn = q.gather(-1, tokens[None, :, :, None].expand(*q.shape[:-1], 1))[..., 0]
    return Drafts(tokens, drawn.prod(-1), Sampled(q.flatten(0, 1), per_drafter=True))


def of_siblings(q: Tensor, count: int) -> Tensor:
    """Returns ``[count, ..., V]``: a distribution for each sibling where each has its own. That of
    the first is q, the next have its numbers at other tokens, and the third is sure of a token."""
    probs = [q.roll(rank, -1) for rank in range(count)]
    if count > 2:
        probs[2] = torch.zeros_like(q).scatter_(-1, probs[2].argmax(-1, keepdim=True), 1.0)
    return torch.stack(probs)


def stopping(world: World, parents: list[int]) -> Drafts:
    """Returns chains that end after their first token 0."""
    drafts = iid(world, parents)
    before = (drafts.tokens != 0).long().cumprod(1).sum(1)
    counts = (before + 1).clamp(max=len(parents))
    return _ended(world, drafts, counts.expand(world.pairs, -1))


def unsure(world: World, parents: list[int]) -> Drafts:
    """Returns chains that end where the distribution of the next token has no token as probable as
    `SURE`."""
    drafts = iid(world, parents)
    sure = probs_at_parents(world, drafts.tokens, parents).amax(-1) >= SURE  # [G, R, N]
    return _ended(world, drafts, sure.long().cumprod(-1).sum(-1))


def doubting(world: World, parents: list[int]) -> Drafts:
    """Returns chains that the length policy "stop_head" ends: once a head over the drafter's states
    at the drafted tokens, which the target has not seen yet, finds it likely that one is wrong."""
    drafts = iid(world, parents)
    states = world.draft_states[:, world.contexts(drafts.tokens, parents)]  # [G, R, M, H]
    continue_on_hidden = _stop_head(states.shape[-1]).terms([], DraftingTerms()).continue_on_hidden
    assert continue_on_hidden is not None
    # In the order of a draft: at the root, then at each token before the next one is drawn.
    wanted = [continue_on_hidden(states[:, :, node].flatten(0, 1)) for node in range(len(parents))]
    kept = torch.stack(wanted, -1).long().cumprod(-1).sum(-1)
    return _ended(world, drafts, kept.view(world.pairs, -1))


class _Sureness(Classifier):
    """As sure of a token as the first number of its state says."""

    kind: ClassVar[str] = "stop_head"
    Config: ClassVar[type[ClassifierConfig]] = ClassifierConfig

    def forward(self, states: Tensor) -> Tensor:
        return states[..., 0]


def _stop_head(width: int) -> LengthPolicy:
    """The policy itself, with a head that was not trained. width: H."""
    shape = TargetShape(width, vocab_size=1, layers=1)
    head = _Sureness(ModelSignature(shape, torch.zeros(1, width)), ClassifierConfig())
    options = length_options("stop_head", {"head": head})
    return find_length("stop_head")(1, options)


def _ended(world: World, drafts: Drafts, counts: Tensor) -> Drafts:
    """The same chains, ended after ``counts`` tokens, ``[G, R]``."""
    distribution, tokens = drafts.distribution, drafts.tokens
    assert isinstance(distribution, Sampled)
    # Proposals that agree up to their ends are one proposal: the one filled up with 0 counts.
    beyond = torch.arange(tokens.shape[1]) >= counts[..., None]  # [G, R, N]
    first = ((tokens == 0) | ~beyond).all(-1)
    q = distribution.q.view(world.pairs, -1, *distribution.q.shape[1:])
    drawn = q.gather(-1, tokens[None, :, :, None].expand(*q.shape[:-1], 1))[..., 0]
    chance = torch.where(beyond, 1.0, drawn).prod(-1) * first
    return Drafts(tokens, chance, distribution, counts=counts)


BUILT_IN: dict[str, Drafting] = {
    "point": point,
    "iid": iid,
    "without": without,
    "several": several,
    "stopping": stopping,
    "unsure": unsure,
    "doubting": doubting,
}
ENDING = (stopping, unsure, doubting)
"""The ways of drafting that decide themselves where a draft ends; they make chains only."""


def probs_at_parents(world: World, tokens: Tensor, parents: list[int]) -> Tensor:
    """Returns ``[G, R, N, V]``: q at the parent of each drafted token."""
    above = world.contexts(tokens, parents)[:, parents]  # [R, N]
    return world.q[:, above]


def _all_tokens(vocabulary: int, nodes: int) -> Tensor:
    grid = torch.cartesian_prod(*[torch.arange(vocabulary)] * nodes)
    return grid.reshape(-1, nodes)


def _each(token: Tensor, probs: Tensor) -> Tensor:
    """``[R]`` to the index ``[G, R, 1]`` of one token per proposal."""
    return token[None, :, None].expand(*probs.shape[:-1], 1)
