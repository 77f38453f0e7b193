"""One proposal from those of several drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree


def row_by_row(made: Sequence[Proposal], chosen: Sequence[int], vocabulary: int) -> Proposal:
    """Returns one proposal that has each row from one drafter.

    Next to drawn tokens, a fixed one gets a distribution in which it has all the probability.
    Auxiliary tokens are kept if all rows are one drafter's. chosen: places in ``made``, by row.
    """
    if len(set(chosen)) == 1:
        return made[chosen[0]]
    width = max(made[which].tokens.shape[1] for which in chosen)
    device = made[0].tokens.device
    parts = [_padded(made[which], row, width) for row, which in enumerate(chosen)]
    tokens = torch.stack([tokens for tokens, _ in parts])
    chain = all(made[which].tree.is_chain for which in chosen)
    parents = torch.stack([parents for _, parents in parts])
    tree = Tree.chain(len(chosen), width, device) if chain else Tree(parents)
    counts = torch.stack([made[which].counts[row] for row, which in enumerate(chosen)])
    predicted = [bool(made[at].predicted) and made[at].predicted[r] for r, at in enumerate(chosen)]
    proposal = Proposal(tokens, tree, counts, Deterministic(), predicted=predicted)
    probs = [made[which].distribution for which in chosen]
    sampled = [distribution for distribution in probs if isinstance(distribution, Sampled)]
    draft_probs = _stacked([made[which].draft_probs for which in chosen], proposal, vocabulary)
    if not sampled:
        return replace(proposal, draft_probs=draft_probs)
    q = _stacked(
        [distribution.q if isinstance(distribution, Sampled) else None for distribution in probs],
        proposal,
        vocabulary,
    )
    assert q is not None
    fixed = _fixed_rows(made, chosen, proposal)
    replacement = all(distribution.with_replacement for distribution in sampled)
    per_drafter = any(distribution.per_drafter for distribution in sampled)
    return replace(
        proposal,
        distribution=Sampled(q, replacement, fixed, per_drafter),
        draft_probs=draft_probs,
    )


def _fixed_rows(
    made: Sequence[Proposal], chosen: Sequence[int], proposal: Proposal
) -> Tensor | None:
    """``[B, N]`` bool: the tokens of the joined proposal that were not drawn; None if all were."""
    if not any(_some_fixed(made[which]) for which in chosen):
        return None
    marks = torch.zeros_like(proposal.tokens, dtype=torch.bool)
    for row, which in enumerate(chosen):
        one = _fixed(made[which])[row]
        marks[row, : len(one)] = one
    return marks & proposal.valid


def _padded(proposal: Proposal, row: int, width: int) -> tuple[Tensor, Tensor]:
    """One row's tokens and parents ``[N]``, filled up."""
    tokens, parents = proposal.tokens[row], proposal.tree.parents[row]
    beyond = torch.arange(len(tokens), width, device=tokens.device)
    return torch.cat([tokens, torch.zeros_like(beyond)]), torch.cat([parents, beyond])


def _stacked(probs: Sequence[Tensor | None], proposal: Proposal, vocabulary: int) -> Tensor | None:
    """``[B, N, V]`` from each row's ``[B, n, V]``; where a row has none, its tokens have all the
    probability."""
    known = [distribution for distribution in probs if distribution is not None]
    if not known:
        return None
    shape = (*proposal.tokens.shape, vocabulary)
    certain = known[0].new_zeros(shape).scatter_(2, proposal.tokens[..., None], 1.0)
    for row, distribution in enumerate(probs):
        if distribution is not None:
            certain[row, : distribution.shape[1]] = distribution[row]
    return certain


def side_by_side(
    made: Sequence[Proposal], counts: Sequence[Sequence[int]], vocabulary: int, per_drafter: bool
) -> Proposal:
    """Returns chains that were drawn independently, as a tree that forks at the root only.

    counts: nodes of each drafter, by row. per_drafter: whether their distributions differ; a fixed
    token has all the probability in its own.
    """
    rows, device = len(made[0].counts), made[0].tokens.device
    offsets = [0]
    for proposal in made:
        offsets.append(offsets[-1] + proposal.tokens.shape[1])
    index: list[list[int]] = [[] for _ in range(rows)]
    parents: list[list[int]] = [[] for _ in range(rows)]
    for which, offset in enumerate(offsets[:-1]):
        for row in range(rows):
            for place in range(counts[which][row]):
                parents[row].append(0 if place == 0 else len(index[row]))
                index[row].append(offset + place)
    width = max(map(len, index))
    sizes = to_device([len(row) for row in index], device)
    parents = [[*row, *range(len(row), width)] for row in parents]
    at = padded(index, device)  # [B, N]
    tokens = torch.cat([proposal.tokens for proposal in made], 1).gather(1, at)
    q = torch.cat([_distribution_of(one, vocabulary) for one in made], 1)
    q = q.gather(1, at[..., None].expand(-1, -1, vocabulary))
    fixed = torch.cat([_fixed(one) for one in made], 1).gather(1, at)
    distribution = Sampled(
        q, fixed=fixed if any(map(_some_fixed, made)) else None, per_drafter=per_drafter
    )
    return Proposal(tokens, Tree(to_device(parents, device)), sizes, distribution)


def _distribution_of(proposal: Proposal, vocabulary: int) -> Tensor:
    """``[B, N, V]``: what the tokens were drawn from; fixed ones have all the probability."""
    if isinstance(proposal.distribution, Sampled):
        return proposal.distribution.q
    shape = (*proposal.tokens.shape, vocabulary)
    certain = torch.zeros(shape, device=proposal.tokens.device)
    return certain.scatter_(2, proposal.tokens[..., None], 1.0)


def _fixed(proposal: Proposal) -> Tensor:
    """``[B, N]`` bool: the tokens that were not drawn."""
    distribution = proposal.distribution
    if isinstance(distribution, Sampled) and distribution.fixed is not None:
        return distribution.fixed
    return torch.full_like(
        proposal.tokens, isinstance(distribution, Deterministic), dtype=torch.bool
    )


def _some_fixed(proposal: Proposal) -> bool:
    distribution = proposal.distribution
    return (
        distribution.fixed is not None
        if isinstance(distribution, Sampled)
        else proposal.tree.size > 0
    )
