"""Proposals of several drafters, joined: which tokens were given and not drawn stays known."""

from __future__ import annotations

import torch

from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.methods.choosers.joining import row_by_row

VOCABULARY = 5


def proposal(tokens: list[list[int]], distribution: Deterministic | Sampled) -> Proposal:
    rows, width = len(tokens), len(tokens[0])
    counts = torch.full((rows,), width)
    return Proposal(torch.tensor(tokens), Tree.chain(rows, width), counts, distribution)


def half_given(tokens: list[list[int]]) -> Proposal:
    """The first token of each chain was given, the others were drawn."""
    given = torch.zeros(len(tokens), len(tokens[0]), dtype=torch.bool)
    given[:, 0] = True
    q = torch.full((*given.shape, VOCABULARY), 1 / VOCABULARY)
    return proposal(tokens, Sampled(q, fixed=given))


def given_of(made: Proposal) -> list[list[bool]]:
    assert isinstance(made.distribution, Sampled)
    assert made.distribution.fixed is not None
    assert made.distribution.fixed.shape == made.distribution.q.shape[:2] == made.tokens.shape
    found: list[list[bool]] = made.distribution.fixed.tolist()
    return found


def test_rows_of_several_drafters_keep_what_was_given() -> None:
    drawn = half_given([[1, 2, 3], [1, 2, 3]])
    look_up = proposal([[4, 4], [4, 4]], Deterministic())
    joined = row_by_row([drawn, look_up], [0, 1], VOCABULARY)
    assert given_of(joined) == [[True, False, False], [True, True, False]]  # one is padding


def test_a_cut_proposal_keeps_what_was_given() -> None:
    assert given_of(half_given([[1, 2, 3], [1, 2, 3]]).first([2, 1])) == [[True, False]] * 2


def test_nodes_that_are_kept_keep_what_was_given() -> None:
    made = half_given([[1, 2, 3], [1, 2, 3]])
    kept = made.keep(torch.tensor([[True, False, False], [True, True, True]]), width=3)
    assert kept.counts.tolist() == [1, 3]
    assert given_of(kept)[0][:1] == [True]
    assert given_of(kept)[1] == [True, False, False]


def test_where_all_was_drawn_nothing_is_marked() -> None:
    q = torch.full((1, 3, VOCABULARY), 1 / VOCABULARY)
    made = proposal([[1, 2, 3]], Sampled(q)).first([2])
    assert isinstance(made.distribution, Sampled)
    assert made.distribution.fixed is None
