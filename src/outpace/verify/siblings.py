"""Helpers for rules that weigh siblings against each other.

Over siblings drawn from q, what is left of p after subtracting q once or several times is always
proportional to [p - t q]_+ for some t, so a rule only keeps the number t of each node and not a
residual over the vocabulary. (Without replacement too: a token that was removed after it had been
rejected has p <= t q already.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.verify.probs import select_node

TINY = 1e-300
"""Smallest divisor: keeps quotients finite where the case they belong to has probability 0."""


def is_deterministic(proposal: Proposal) -> bool:
    """Returns whether nothing was sampled, so that the match rule is the whole answer."""
    return isinstance(proposal.distribution, Deterministic) or proposal.tokens.shape[1] == 0


def children(proposal: Proposal) -> Tensor:
    """Returns ``[B, M]``: how many valid children each node has."""
    return (proposal.tree.child_of & proposal.valid[:, None, :]).sum(-1)


def child(proposal: Proposal, rank: int) -> Tensor:
    """Returns ``[B, M]``: the drafted index (node - 1) of each node's child of this rank, or -1."""
    return _only(proposal.tree.child[rank], proposal.valid)


def possible_child(proposal: Proposal, rank: int, possible: Tensor) -> Tensor:
    """Returns `child`, and -1 too where that child is not ``possible`` [B, N]."""
    return _only(proposal.tree.child[rank], proposal.valid & possible)


def _only(index: Tensor, kept: Tensor) -> Tensor:
    """The index of a child, or -1 for none, where that child is ``kept`` [B, N]; else -1."""
    return torch.where((index >= 0) & kept.gather(1, index.clamp(min=0)), index, -1)


def drawable(proposal: Proposal, drafted: Tensor) -> Tensor:
    """Returns ``[B, N]`` bool: the nodes whose token could be drawn after those of their elders.

    drafted: ``[B, N]``, the mass of each token in its row of q. Drawn without replacement, a token
    can come once only; what comes after q is exhausted is no draw.
    """
    assert isinstance(proposal.distribution, Sampled)
    some = drafted > 0
    if proposal.distribution.with_replacement or proposal.tree.is_chain:
        return some
    return some & ~repeats(proposal)


def repeats(proposal: Proposal) -> Tensor:
    """Returns ``[B, N]`` bool: the nodes whose token a valid elder sibling has, too."""
    tokens = proposal.tokens
    same = proposal.tree.elder & (tokens[:, :, None] == tokens[:, None, :])
    return (same & proposal.valid[:, None, :]).any(-1)


def children_probs_at(proposal: Proposal, node: Tensor) -> Tensor:
    """Returns ``[B, V]`` float64: the distribution that the node's children were drawn from, 0
    without any.

    The proposal must be sampled. Siblings share their row of q, so the eldest child's row is taken.
    """
    assert isinstance(proposal.distribution, Sampled)
    first = child(proposal, 0).gather(1, node[:, None])  # [B, 1]
    return select_node(proposal.distribution.q, first[:, 0].clamp(min=0)).double().mul_(first >= 0)


def excess(p: Tensor, q: Tensor, t: Tensor) -> Tensor:
    """Returns ``[..., V]``: [p - t q]_+. t: ``[...]``."""
    return torch.addcmul(p, t[..., None], q, value=-1).clamp_(min=0)


def left_over(
    p: Tensor, proposal: Proposal, at: Tensor, t: Tensor, gone: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the sums of [p - t q]_+, ``[F]`` float64, and those of q without some tokens.

    These sums over the vocabulary are all that a node's siblings have to be weighed by. They are
    taken a few nodes at a time, so that no float64 copy of all distributions is ever made.

    at: ``[3, F]``, the row, the node and the drafted index of one of its children, of each of F
    nodes; t: ``[F]``; gone: ``[F, G]`` tokens, if the second sums are wanted.
    """
    assert isinstance(proposal.distribution, Sampled)
    rest, left = [], []
    for part in pieces(t.shape[0], p.shape[-1], p.device):
        row, node, child = at[:, part].unbind()
        q = proposal.distribution.q[row, child].double()
        here = p[row, node].double()
        rest.append(here.addcmul_(t[part, None], q, value=-1).clamp_(min=0).sum(-1))
        if gone is not None:
            left.append(q.scatter_(1, gone[part], 0.0).sum(-1))
    return torch.cat(rest), torch.cat(left) if left else None


def removed(proposal: Proposal, there: Tensor, row: Tensor, child: Tensor) -> Tensor:
    """Returns ``[F, N]``: the tokens that q has lost once F nodes and their elders are drawn.

    there: ``[B, N]``, the nodes that could be drawn (`drawable`); row, child: ``[F]``, the row and
    the drafted index of each node. Tokens occur several times.
    """
    tree, tokens = proposal.tree, proposal.tokens[row]  # [F, N]
    own = tokens.gather(1, child[:, None])
    drawn = tree.elder[row, child] & (proposal.valid & there)[row]
    # The own token stands in where nothing was drawn. If it could not be drawn itself, then q has
    # no mass left there to lose.
    return torch.where(drawn, tokens, own)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Returns a / b, finite where b is 0."""
    return a / b.clamp(min=TINY)


def in_turn(accept: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Returns the distributions of leaving each node, when its children are tried in turn.

    accept: ``[B, N]``, that a child passes, given that its elder siblings did not. The results are
    the probability of going to each child, ``[B, N]``, and of staying at each node, ``[B, M]``.
    """
    tree = proposal.tree
    fail = 1 - torch.where(proposal.valid, accept, 0.0)  # [B, N]
    before = torch.where(tree.elder, fail[:, None, :], 1.0).prod(-1)
    stay = torch.where(tree.child_of, fail[:, None, :], 1.0).prod(-1)
    return (1 - fail) * before, stay


def reach_probs(step: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B, M]``: the chance to come to each node. step: ``[B, N]``, to each child."""
    full = torch.cat([torch.ones_like(step[:, :1]), step], 1) if tree.size else step.new_ones(1)
    return torch.where(tree.ancestors, full[..., None, :], 1.0).prod(-1)


# -- equal drafts ------------------------------------------------------------------------------


def merged(proposal: Proposal) -> tuple[Proposal, Tensor]:
    """Returns the proposal with the children of equal nodes pooled, and who stands for each node.

    Two nodes are equal if their paths have the same tokens; the eldest stands for all, ``[B, M]``,
    and all their children hang from it. Children that were independent draws from the same
    distribution stay so, since whether their parents were equal was settled before they were drawn.
    """
    tree, tokens = proposal.tree, proposal.tokens
    stands = torch.arange(tree.size + 1, device=tokens.device).repeat(tokens.shape[0], 1)
    if tree.is_chain:
        return proposal, stands
    alike = _alike(proposal)
    if not bool((alike & tree.elder).any()):  # without equal siblings no nodes are equal
        return proposal, stands
    alike = alike | torch.eye(tree.size, dtype=torch.bool, device=tokens.device)
    for _ in range(tree.height):  # each time one level more is settled
        parents = stands.gather(1, tree.parents)
        same = alike & (parents[:, :, None] == parents[:, None, :])
        stands[:, 1:] = same.int().argmax(-1) + 1  # the first of them
    parents = stands.gather(1, tree.parents)
    return Proposal(tokens, Tree(parents), proposal.counts, proposal.distribution), stands


def _alike(proposal: Proposal) -> Tensor:
    """``[B, N, N]`` bool: valid nodes that have the same token, if no more."""
    tokens, valid = proposal.tokens, proposal.valid
    both = valid[:, :, None] & valid[:, None, :]
    return both & (tokens[:, :, None] == tokens[:, None, :])


def reach_merged(step: Tensor, tree: Tree, stands: Tensor) -> Tensor:
    """Returns ``[B, M]``: as `reach_probs`, where going to a node is going to who stands for it."""
    total = torch.zeros(stands.shape, dtype=step.dtype, device=step.device)
    total[:, 0].fill_(1)
    depth = tree.depth[:, 1:]
    for level in range(1, tree.height + 1):
        arriving = total.gather(1, tree.parents) * step * (depth == level)
        total = total.scatter_add(1, stands[:, 1:], arriving)
    return total
