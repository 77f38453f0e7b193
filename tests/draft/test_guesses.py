"""Trees on the host become proposals and come back from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.core.proposal import Deterministic
from outpace.draft.token_trees import TokenTree, deterministic_trees, merged, token_trees_of

HOST = torch.device("cpu")
FORKED = TokenTree([5, 7, 8, 9], [0, 0, 2, 1])


@pytest.mark.parametrize(
    "guesses",
    [
        [],
        [TokenTree(), TokenTree()],
        [TokenTree.chain([1, 2, 3]), TokenTree()],
        [FORKED, TokenTree.chain([6]), TokenTree()],
    ],
    ids=["no rows", "no nodes", "chains", "trees"],
)
def test_a_proposal_says_the_trees_that_it_was_made_from(guesses: list[TokenTree]) -> None:
    made = deterministic_trees(guesses, HOST)
    assert made.tokens.shape == made.tree.parents.shape
    assert made.tokens.shape == (len(guesses), max(map(len, guesses), default=0))
    assert isinstance(made.distribution, Deterministic)
    assert made.tree.is_chain == all(guess.is_chain for guess in guesses)
    assert token_trees_of(made) == guesses


def test_padding_forks_no_node() -> None:
    """A row that is shorter than the others goes on as a chain: no rule meets siblings there."""
    made = deterministic_trees([FORKED, TokenTree.chain([6])], HOST)
    assert made.tree.parents.tolist() == [[0, 0, 2, 1], [0, 1, 2, 3]]


def test_the_first_children_lead_to_the_eldest_chain() -> None:
    assert FORKED.eldest() == {0: 1, 1: 4, 2: 3}
    assert FORKED.eldest_chain() == [5, 9]
    assert FORKED.follow([7, 8, 8]) == [2, 3]
    assert FORKED.follow([8]) == []


def test_trees_are_merged_by_their_paths() -> None:
    both = merged([TokenTree.chain([7, 8]), FORKED])
    assert (both.tokens, both.parents) == ([7, 8, 5, 9], [0, 1, 0, 3])
    assert merged([TokenTree.chain([7, 8]), FORKED], most=0) == TokenTree()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5), st.integers(0, 9))
def test_merged_chains_share_their_beginnings(chains: list[list[int]], nodes: int) -> None:
    guess = merged(map(TokenTree.chain, chains), nodes)
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(guess.tokens, guess.parents, strict=True):
        found.append((*found[parent], token))
    every = [tuple(chain[:end]) for chain in chains for end in range(1, len(chain) + 1)]
    assert found[1:] == list(dict.fromkeys(every))[:nodes]
