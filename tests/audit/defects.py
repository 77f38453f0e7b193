"""Known defects of speculative decoding, as rules and drafters for the gate. Never shipped.

A defect is a rule and a way of drafting, of which one is wrong. `SHAPES` are those it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.audit.gate import drafting
from outpace.audit.gate.drafting import Drafting, Drafts, probs_at_parents
from outpace.audit.gate.gate_trees import FAST, GateTree
from outpace.audit.gate.world import World
from outpace.core.proposal import Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.verify.base import Rule
from outpace.verify.lossless.block import BlockRule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.lossless.recursive import RecursiveRule
from outpace.verify.lossless.token import TokenRule
from outpace.verify.probs import (
    draft_probs_at,
    first_rejection_probs,
    gather_probs,
    normalize,
    ratio,
    select_node,
)

ONE, TWO, THREE, PAIR, TRIPLE = (FAST[i] for i in range(5))
CHAIN_6, FORKED = (shape for shape in FAST if shape.depth > 3)


@dataclass(frozen=True, eq=False)
class Defect:
    rule: Rule
    drafting: Drafting
    shapes: tuple[GateTree, ...] = (TWO,)
    source: str = ""


def at_parent(p: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B, N, V]``: the distribution that each drafted node is checked against."""
    return p.gather(1, tree.parents[..., None].expand(-1, -1, p.shape[-1]))


def proposed_mass(proposal: Proposal, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Returns ``[B, N, V]``: the distribution of each drafted token, one-hot where it is a
    point."""
    if isinstance(proposal.distribution, Sampled):
        return proposal.distribution.q.to(dtype)
    return torch.nn.functional.one_hot(proposal.tokens, vocabulary).to(dtype)


# -- the drafter lies about q, or selects after sampling -------------------------------------------


def argmax_with_soft_q(world: World, parents: list[int]) -> Drafts:
    """Drafts by argmax and hands over the distribution it did not sample from."""
    drafts = drafting.iid(world, parents)
    q = probs_at_parents(world, drafts.tokens, parents)
    greedy = torch.nn.functional.one_hot(q.argmax(-1), world.vocabulary).double()
    chance = gather_probs(greedy, drafts.tokens.expand(*q.shape[:-1])).prod(-1)
    return replace(drafts, chance=chance)


def top_k_as_if_drawn(world: World, parents: list[int]) -> Drafts:
    """Siblings are the likeliest tokens, verified as if drawn without replacement."""
    drafts = drafting.without(world, parents)
    q = world.q[:, 0]
    best = q.topk(len(parents), -1).indices[:, None]  # [G, 1, k]
    return replace(drafts, chance=(drafts.tokens == best).all(-1).double())


def iid_as_if_without(world: World, parents: list[int]) -> Drafts:
    """Siblings are independent draws, verified as if drawn without replacement."""
    drafts = drafting.iid(world, parents)
    distribution = drafts.distribution
    assert isinstance(distribution, Sampled)
    return replace(drafts, distribution=Sampled(distribution.q, with_replacement=False))


def without_as_if_iid(world: World, parents: list[int]) -> Drafts:
    drafts = drafting.without(world, parents)
    distribution = drafts.distribution
    assert isinstance(distribution, Sampled)
    return replace(drafts, distribution=Sampled(distribution.q, with_replacement=True))


def at_half_the_temperature(world: World, parents: list[int]) -> Drafts:
    """Draws at one temperature and hands over q of another."""
    colder = replace(world, q=_norm(world.q**2))
    drafts = drafting.iid(colder, parents)
    return replace(drafts, distribution=drafting.iid(world, parents).distribution)


def in_lower_precision(world: World, parents: list[int]) -> Drafts:
    """Draws from a half-precision softmax and hands over the one in full."""
    rounded = replace(world, q=_norm(world.q.bfloat16().double()))
    drafts = drafting.iid(rounded, parents)
    return replace(drafts, distribution=drafting.iid(world, parents).distribution)


def padded_vocabulary(world: World, parents: list[int]) -> Drafts:
    """q has a share on padding rows, which are cut off without renormalising."""
    drafts = drafting.iid(world, parents)
    distribution = drafts.distribution
    assert isinstance(distribution, Sampled)
    return replace(drafts, distribution=Sampled(distribution.q * 0.8))


def better_of_two(world: World, parents: list[int]) -> Drafts:
    """Samples two chains and keeps the one that it finds likelier."""
    drafts = drafting.iid(world, parents)
    chance = drafts.chance  # [G, R]
    better = (chance[:, :, None] > chance[:, None, :]).double()
    tie = (chance[:, :, None] == chance[:, None, :]).double()
    kept = chance[:, :, None] * chance[:, None, :] * (2 * better + tie)
    return replace(drafts, chance=kept.sum(-1))


def drops_the_unlikely(world: World, parents: list[int]) -> Drafts:
    """Ends the chain before a token that it had sampled and found unlikely."""
    drafts = drafting.iid(world, parents)
    q = probs_at_parents(world, drafts.tokens, parents)
    drawn = gather_probs(q, drafts.tokens.expand(*q.shape[:-1]))  # [G, R, N]
    fine = (drawn >= 0.4).long().cumprod(-1).sum(-1)
    return _ended(drafts, drawn, fine)


def drops_what_the_target_would_refuse(world: World, parents: list[int]) -> Drafts:
    """Ends the chain before a sampled token to which the target gives less than the drafter does:
    it has seen the verdict."""
    drafts = drafting.iid(world, parents)
    above = world.contexts(drafts.tokens, parents)[:, parents]  # [R, N]
    every = drafts.tokens.expand(world.pairs, *drafts.tokens.shape)
    drawn, theirs = gather_probs(world.q[:, above], every), gather_probs(world.p[:, above], every)
    fine = (theirs >= drawn).long().cumprod(-1).sum(-1)
    return _ended(drafts, drawn, fine)


def drops_what_the_stop_head_doubts(world: World, parents: list[int]) -> Drafts:
    """Asks a stop head about a sampled token, and leaves it out where the head says no. What it
    looks at is right, only the token it belongs to has to stay."""
    drafts = drafting.iid(world, parents)
    q = probs_at_parents(world, drafts.tokens, parents)
    drawn = gather_probs(q, drafts.tokens.expand(*q.shape[:-1]))
    states = world.draft_states[:, world.contexts(drafts.tokens, parents)[:, 1:]]  # [G, R, N, H]
    fine = (states[..., 0] >= 0).long().cumprod(-1).sum(-1)
    return _ended(drafts, drawn, fine)


def _ended(drafts: Drafts, drawn: Tensor, length: Tensor) -> Drafts:
    """The chains, cut at a length that depends on them: one proposal for each chain and length."""
    distribution = drafts.distribution
    assert isinstance(distribution, Sampled)
    nodes = drafts.tokens.shape[1]
    tokens = drafts.tokens.repeat(nodes + 1, 1)
    counts = torch.arange(nodes + 1).repeat_interleave(len(drafts.tokens))
    chance = torch.cat([drafts.chance * (length == n) for n in range(nodes + 1)], 1)
    q = distribution.q.view(*drawn.shape, -1).repeat(1, nodes + 1, 1, 1)
    return Drafts(tokens, chance, Sampled(q.flatten(0, 1)), counts=counts)


def last_token_first(world: World, parents: list[int]) -> Drafts:
    """Draws the second token before the first, and hands over q of both as if in order."""
    drafts = drafting.iid(world, parents)
    first = world.q[:, 0][:, drafts.tokens[:, 0]]  # [G, R]
    marginal = torch.einsum("gx,gxy->gy", world.q[:, 0], world.q[:, 1 : world.vocabulary + 1])
    second = marginal[:, drafts.tokens[:, 1]]
    return replace(drafts, chance=first * second)


# -- the rule is wrong -----------------------------------------------------------------------------


class Broken(TokenRule):
    """A rule that is itself but for what a subclass changes."""

    name = "broken"


class Mutated(Rule):
    """A rule that is shown other distributions than the target's, for stopping or for the next
    token."""

    name = "broken"
    lossless = True

    def __init__(
        self,
        inner: Rule,
        stop: Callable[[Tensor, Proposal], Tensor] | None = None,
        next: Callable[[Tensor, Proposal], Tensor] | None = None,
    ) -> None:
        self.inner, self.on_stop, self.on_next = inner, stop, next
        self.takes, self.trees = inner.takes, inner.trees  # type: ignore[misc]

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        return self.inner.stop(self.on_stop(p, proposal) if self.on_stop else p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return self.inner.next(self.on_next(p, proposal) if self.on_next else p, proposal, node)


def unwarped(p: Tensor, proposal: Proposal) -> Tensor:
    """The distribution before temperature 1/2: the target's own is its square."""
    return _norm(p**0.5)


def unwarped_after_all(p: Tensor, proposal: Proposal) -> Tensor:
    """The distribution before warping, at the last token only: the bonus token."""
    raw = unwarped(p, proposal)
    last = torch.arange(p.shape[1]) == proposal.counts[:, None]
    return torch.where(last[..., None], raw, p)


def unwarped_before_the_end(p: Tensor, proposal: Proposal) -> Tensor:
    """The distribution before warping wherever a token was drafted: the residual."""
    raw = unwarped(p, proposal)
    last = torch.arange(p.shape[1]) == proposal.counts[:, None]
    return torch.where(last[..., None], p, raw)


def of_the_next_position(p: Tensor, proposal: Proposal) -> Tensor:
    return torch.cat([p[:, 1:], p[:, -1:]], 1)


def with_stale_history(p: Tensor, proposal: Proposal) -> Tensor:
    """Penalties that see only the committed text: every node has the history of its parent."""
    return torch.cat([p[:, :1], at_parent(p, proposal.tree)], 1)


def always_the_argmax(p: Tensor, proposal: Proposal) -> Tensor:
    return torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)


class FirstDraftOnly(Broken):
    """The residual of a point draft forgets that the drafted token was refused."""

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return select_node(p, node)


class ResidualAfterAll(Broken):
    """Subtracts the last q from the bonus token's distribution too."""

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        q = select_node(proposed_mass(proposal, p.shape[-1], p.dtype), (node - 1).clamp(min=0))
        bonus = (select_node(p, node) - q).clamp(min=0)
        right = super().next(p, proposal, node)
        use = (node == proposal.counts) & (node > 0) & (bonus.sum(-1) > 0)
        return torch.where(use[:, None], _norm(bonus + 1e-300), right)


class ForgetfulBelow(Mutated):
    """Draws from p itself, not from the residual, where a walk ends four nodes or more below the
    root."""

    def __init__(self, inner: Rule) -> None:
        super().__init__(inner)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        deep = proposal.tree.depth.expand(len(p), -1).gather(1, node[:, None]) >= 4
        return torch.where(deep, select_node(p, node), self.inner.next(p, proposal, node))


class NoisyResidual(Broken):
    """Keeps rounding noise: a small number is added lest the residual be empty."""

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return _norm(super().next(p, proposal, node) + 1e-6)


class AbsoluteResidual(Broken):
    """|p - q| where it should be [p - q]_+."""

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if not proposal.tokens.shape[1]:
            return select_node(p, node)
        following = node.clamp(max=proposal.tokens.shape[1] - 1)
        q = select_node(proposed_mass(proposal, p.shape[-1], p.dtype), following)
        residual = (select_node(p, node) - q).abs() + 1e-300
        return _norm(residual).where((node < proposal.counts)[:, None], select_node(p, node))


class UnseenTargetToken(Broken):
    """OpenVINO GenAI: draft probability of the drafted token over target probability of another,
    freshly sampled one."""

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        distribution = at_parent(p, proposal.tree)
        drawn = gather_probs(proposed_mass(proposal, p.shape[-1], p.dtype), proposal.tokens)
        accept = (distribution * ratio(drawn[..., None].expand_as(distribution), distribution)).sum(
            -1
        )
        return first_rejection_probs(accept, proposal)


class RoundedUniform(Broken):
    """OpenVINO GenAI: the uniform is a multiple of 1/100."""

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        at = gather_probs(at_parent(p, proposal.tree), proposal.tokens)
        q = gather_probs(proposed_mass(proposal, p.shape[-1], p.dtype), proposal.tokens)
        return first_rejection_probs((ratio(at, q) * 100).floor() / 100, proposal)


class Swapped(Broken):
    """q / p."""

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        at = gather_probs(at_parent(p, proposal.tree), proposal.tokens)
        q = gather_probs(proposed_mass(proposal, p.shape[-1], p.dtype), proposal.tokens)
        return first_rejection_probs(ratio(q, at), proposal)


class RatioAboveOne(Broken):
    """Takes p / q for a probability where it is above 1 too, and leaves to rejections what q lacks:
    over all proposals the sums come out right, with negative summands that nobody can draw from."""

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        at = gather_probs(at_parent(p, proposal.tree), proposal.tokens)
        q = gather_probs(proposed_mass(proposal, p.shape[-1], p.dtype), proposal.tokens)
        return first_rejection_probs((at / q).nan_to_num(nan=0.0), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        here, following = select_node(p, node), node.clamp(max=proposal.tree.size - 1)
        lacking = draft_probs_at(proposal, following, here) == 0
        left = normalize(torch.where(lacking, here, 0.0), fallback=here)
        return left.where((node < proposal.counts)[:, None], here)


class AnySurvivor(Broken):
    """Keeps each token that passes, although one before it did not."""

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        at = gather_probs(at_parent(p, proposal.tree), proposal.tokens)
        pass_ = ratio(
            at, gather_probs(proposed_mass(proposal, p.shape[-1], p.dtype), proposal.tokens)
        )
        pass_ = torch.where(proposal.valid, pass_, 0.0)
        full = torch.cat([torch.ones_like(pass_[:, :1]), pass_], 1)
        later = torch.cat([(1 - pass_).flip(1).cumprod(1).flip(1), torch.ones_like(full[:, :1])], 1)
        return full * later


class Siblings(RecursiveRule):
    """The recursive rule without replacement on the root's children, written out, with a defect."""

    name = "broken"

    def __init__(self, remove: bool = True, renormalise: bool = True, subtract: bool = True):
        self.remove, self.renormalise, self.subtract = remove, renormalise, subtract

    def _each(self, p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        distribution = proposal.distribution
        assert isinstance(distribution, Sampled)
        left, q = p[:, 0], distribution.q[:, 0]
        accept = []
        for child in range(proposal.tokens.shape[1]):
            token, valid = proposal.tokens[:, child, None], proposal.valid[:, child, None]
            accept.append(ratio(left.gather(1, token), q.gather(1, token))[:, 0])
            rest = (left - q).clamp(min=0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, _norm(rest + 1e-300), left)
            left = torch.where(valid, rest, left) if self.subtract else left
            if self.remove:
                q = q.scatter(1, token, 0.0)
                q = _norm(q + 1e-300) if self.renormalise else q
        return torch.stack(accept, 1), left

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        accept = torch.where(proposal.valid, self._each(p, proposal)[0], 0.0)
        fail = torch.cat([torch.ones_like(accept[:, :1]), (1 - accept).cumprod(1)], 1)
        return torch.cat([fail[:, -1:], accept * fail[:, :-1]], 1)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        left = self._each(p, proposal)[1]
        return torch.where((node == 0)[:, None], left, select_node(p, node))


class AllAtOnce(RecursiveRule):
    """Tests every sibling against p itself and the first residual, as if it were alone."""

    name = "broken"

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        return Siblings(remove=False, subtract=False).stop(p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return TokenRule().next(p, proposal, node).where((node == 0)[:, None], select_node(p, node))


def _norm(mass: Tensor) -> Tensor:
    return mass / mass.sum(-1, keepdim=True)


TOKEN, MATCH, RECURSIVE = TokenRule(), MatchRule(), RecursiveRule()

DEFECTS: dict[str, Defect] = {
    "argmax draft with soft q": Defect(TOKEN, argmax_with_soft_q, source="transformers #47932"),
    "argmax draft with soft q, block": Defect(
        BlockRule(),
        argmax_with_soft_q,
    ),
    "draft at another temperature than q": Defect(TOKEN, at_half_the_temperature),
    "draft from a rounded softmax": Defect(TOKEN, in_lower_precision, source="DeepSpec#31"),
    "padded vocabulary rows not cut": Defect(TOKEN, padded_vocabulary),
    "better of two chains kept": Defect(TOKEN, better_of_two),
    "sampled token dropped by an early stop": Defect(TOKEN, drops_the_unlikely),
    "sampled token dropped for the target's verdict": Defect(
        TOKEN, drops_what_the_target_would_refuse
    ),
    "sampled token dropped by a stop head": Defect(TOKEN, drops_what_the_stop_head_doubts),
    "second token drawn before the first": Defect(TOKEN, last_token_first),
    "top-k siblings as if drawn": Defect(RECURSIVE, top_k_as_if_drawn, (PAIR, TRIPLE), "MCSD"),
    "iid siblings under the rule without replacement": Defect(
        Siblings(), iid_as_if_without, (PAIR, TRIPLE)
    ),
    "siblings without replacement under the iid rule": Defect(
        RECURSIVE, without_as_if_iid, (PAIR, TRIPLE)
    ),
    "q not updated between siblings": Defect(
        Siblings(remove=False), drafting.without, (PAIR, TRIPLE)
    ),
    "q cleared but not renormalised": Defect(
        Siblings(renormalise=False), drafting.without, (PAIR, TRIPLE)
    ),
    "p not updated between siblings": Defect(
        Siblings(subtract=False), drafting.without, (PAIR, TRIPLE)
    ),
    "siblings tested as if each were alone": Defect(AllAtOnce(), drafting.iid, (PAIR, TRIPLE)),
    "residual from unwarped p": Defect(Mutated(TOKEN, next=unwarped_before_the_end), drafting.iid),
    "bonus token from unwarped p": Defect(
        Mutated(TOKEN, next=unwarped_after_all), drafting.iid, source="EAGLE"
    ),
    "accepted on unwarped p": Defect(Mutated(TOKEN, stop=unwarped), drafting.iid, source="SGLang"),
    "resampled from the next position": Defect(
        Mutated(TOKEN, next=of_the_next_position), drafting.iid, source="OpenVINO GenAI"
    ),
    "penalties stale in the block": Defect(
        Mutated(TOKEN, with_stale_history, with_stale_history), drafting.iid, source="SGLang"
    ),
    "verified greedily at any temperature": Defect(
        Mutated(MATCH, always_the_argmax, always_the_argmax), drafting.point, source="SGLang"
    ),
    "accepted softly but resampled greedily": Defect(
        Mutated(TOKEN, next=always_the_argmax), drafting.iid, source="LitGPT"
    ),
    "refused token may come again": Defect(FirstDraftOnly(), drafting.point),
    "residual after full acceptance": Defect(ResidualAfterAll(), drafting.iid),
    "no residual from depth 4 on": Defect(ForgetfulBelow(TOKEN), drafting.iid, (CHAIN_6,)),
    "no residual from depth 4 on, siblings": Defect(
        ForgetfulBelow(RECURSIVE), drafting.without, (FORKED,)
    ),
    "noise in the residual": Defect(NoisyResidual(), drafting.iid),
    "absolute residual": Defect(AbsoluteResidual(), drafting.iid),
    "ratio with another token's target probability": Defect(
        UnseenTargetToken(), drafting.iid, source="OpenVINO GenAI"
    ),
    "uniform rounded to 1/100": Defect(RoundedUniform(), drafting.iid, source="OpenVINO GenAI"),
    "ratio upside down": Defect(Swapped(), drafting.iid),
    "ratio above 1 taken for a probability": Defect(RatioAboveOne(), drafting.iid),
    "accepted after a rejection": Defect(AnySurvivor(), drafting.iid),
}
