"""Helpers that rules share: probabilities at the nodes of a draft, and paths through its tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree


def repeated(chosen: Tensor, tree: Tree) -> Tensor:
    """``[B, N]`` bool: chosen nodes that have a chosen elder sibling."""
    return (tree.elder & chosen[:, None, :]).any(-1) & chosen


def reached(passes: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B, M]`` bool: the nodes whose whole path passes; the root always does.

    passes: ``[B, N]`` bool, of each drafted node by itself.
    """
    every = torch.cat([torch.ones_like(passes[:, :1]), passes], 1)
    return (every[:, None, :] | ~tree.ancestors).all(-1)


def deepest(among: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B]``: the deepest of some nodes, of equally deep ones the first.

    among: ``[B, M]`` bool, with the root.
    """
    return torch.where(among, tree.depth, -1).argmax(1)


def target_probs(p: Tensor, node: Tensor) -> Tensor:
    """Returns ``[B, V]``: the target's own distribution at each row's node, for rules that draw the
    extra token from it.

    p: ``[B, M, V]``; node: ``[B]``.
    """
    here = select_node(p, node)
    return normalize(here, fallback=here)


def stop_within(stop: Tensor, possible: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B, M]``: the distribution of a walk that ends before the first node that is not
    possible. stop: ``[B, M]``, of the walk without that limit; possible: ``[B, N]`` bool."""
    inside = tree.ancestors & reached(possible, tree)[:, None, :]  # [B, M, M]
    last = torch.where(inside, tree.depth[:, None, :], -1).argmax(-1)  # [B, M]
    return torch.zeros_like(stop).scatter_add(1, last, stop)


def next_within(following: Tensor, allowed: Tensor) -> Tensor:
    """Returns ``[B, V]``: a distribution of the next token, of what is allowed. following:
    ``[B, V]``, without that limit; allowed: ``[B, V]``, above 0 for such tokens."""
    inside = following.where(allowed > 0, 0.0)
    changed = (inside != following).any(-1, keepdim=True)
    return torch.where(changed, normalize(inside, fallback=allowed.to(inside)), following)


def p_of_drafted(p: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, N]`` float64: what the target gives each drafted token, at its parent.

    p: ``[B, M, V]``. Only the drafted tokens' own numbers are read, so that no distribution is
    copied.
    """
    if proposal.tree.is_chain:
        return gather_probs(p[:, :-1], proposal.tokens).double()
    rows = torch.arange(p.shape[0], device=p.device)[:, None]
    return p[rows, proposal.tree.parents, proposal.tokens].double()


def map_in_chunks(of: Callable[..., Tensor], probs: Tensor, *others: Tensor) -> Tensor:
    """Returns ``of(probs, *others)``, computed for a few nodes at a time.

    What ``of`` holds in between then stays small, however many nodes there are.

    of: takes parts of all arguments and returns ``[B, n]`` for n nodes; probs: ``[B, N, V]``;
    others: ``[B, N, ...]`` each.
    """
    rows, nodes, vocabulary = probs.shape
    given = (probs, *others)
    parts = list(pieces(nodes, rows * vocabulary, probs.device))
    if len(parts) <= 1:
        return of(*given)
    return torch.cat([of(*(each[:, part] for each in given)) for part in parts], 1)


def gather_probs(probs: Tensor, tokens: Tensor) -> Tensor:
    """Returns ``[B, N]``: each drafted token's probability in its row of ``probs`` [B, N, V]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def q_of_drafted(proposal: Proposal, dtype: torch.dtype) -> Tensor:
    """Returns ``[B, N]``: the chance that each token had to be drafted, 1 if deterministic."""
    if isinstance(proposal.distribution, Deterministic):
        return torch.ones_like(proposal.tokens, dtype=dtype)
    return gather_probs(proposal.distribution.q, proposal.tokens).to(dtype)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Returns min(1, p / q), and 0 for 0 / 0: a token that neither model can produce."""
    return (p / q).nan_to_num(nan=0.0).clamp(max=1)


def select_node(probs: Tensor, node: Tensor) -> Tensor:
    """Returns ``[B, ...]``: each row's entry at its node. probs: ``[B, M, ...]``, node: ``[B]``."""
    return probs[torch.arange(node.shape[0], device=node.device), node]


def normalize(mass: Tensor, fallback: Tensor) -> Tensor:
    """Returns ``mass`` clamped at 0 and divided by its sum; ``fallback`` where nothing is left.

    An empty residual means that p and q agree up to rounding, and then p itself is the distribution
    to use.
    """
    mass = mass.clamp(min=0)
    total = mass.sum(-1, keepdim=True)
    some = total > 0
    return torch.where(some, mass.div_(total.where(some, 1.0)), fallback)


def draft_probs_at(proposal: Proposal, index: Tensor, like: Tensor) -> Tensor:
    """Returns ``[B, V]``: the distribution that one drafted token of each row was drawn from.

    It is one-hot where the tokens are deterministic.

    index: ``[B]``, which token it is in each row (its node - 1); like: ``[B, V]``, any tensor of
    the dtype that the distribution is wanted in.
    """
    if isinstance(proposal.distribution, Sampled):
        return select_node(proposal.distribution.q, index).to(like.dtype)
    return torch.zeros_like(like).scatter_(1, select_node(proposal.tokens, index)[:, None], 1.0)


def first_rejection_probs(accept: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, M]``, the distribution of where a chain stops when its tokens pass one after
    another.

    accept: ``[B, N]``, the probability that each token passes, given that those before it did.
    """
    accept = torch.where(proposal.valid, accept, torch.zeros_like(accept))
    one = accept.new_ones(accept.shape[0], 1)
    reach = torch.cat([one, accept.cumprod(1)], 1)
    fail = torch.cat([1 - accept, one], 1)
    return reach * fail


def stop_at(node: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns ``[B, size]``: the distribution of a walk that is sure to end at ``node``."""
    one_hot: Tensor = torch.nn.functional.one_hot(node, size)
    return one_hot.to(dtype)
