"""Chains and trees of the most frequent continuations of a context."""

from __future__ import annotations

import heapq
from itertools import count

from outpace.draft.token_trees import TokenTree

Texts = list[list[int]]
"""Continuations of one context, those first that win ties. A negative entry ends one early."""


def likeliest_chain(texts: Texts, nodes: int, least: float = 0.0) -> TokenTree:
    """Returns the chain that goes on with the most frequent token each time.

    A node's chance is the product of relative frequencies on its path. least: the chance below
    which the chain ends.

    >>> likeliest_chain([[5, 6], [5, 7], [8, 9]], nodes=2).tokens
    [5, 6]
    """
    guess, chance = TokenTree(), 1.0
    for depth in range(min(nodes, len(texts[0]) if texts else 0)):
        groups = _grouped(texts, depth)
        if not groups:
            break
        token = max(groups, key=lambda each: len(groups[each]))
        chance *= len(groups[token]) / sum(map(len, groups.values()))
        if chance < least:
            break
        texts = groups[token]
        guess.add(token, depth, chance)
    return guess


def likeliest_tree(texts: Texts, nodes: int, least: float = 0.0) -> TokenTree:
    """Returns the tree of the most probable nodes, as `likeliest_chain` counts.

    >>> likeliest_tree([[5, 6], [5, 7], [8, 9]], nodes=3).parents
    [0, 0, 1]
    """
    guess, order = TokenTree(), count()
    heap: list[tuple[float, int, int, int, int, Texts]] = []

    def offer(texts: Texts, depth: int, parent: int, chance: float) -> None:
        groups = _grouped(texts, depth) if depth < len(texts[0]) else {}
        total = sum(map(len, groups.values()))
        for token, members in groups.items():
            own = chance * len(members) / total
            if own >= least:
                heapq.heappush(heap, (-own, next(order), token, parent, depth, members))

    if texts:
        offer(texts, 0, 0, 1.0)
    while heap and len(guess) < nodes:
        chance, _, token, parent, depth, members = heapq.heappop(heap)
        node = guess.add(token, parent, -chance)
        offer(members, depth + 1, node, -chance)
    return guess


def _grouped(texts: Texts, depth: int) -> dict[int, Texts]:
    """Returns the continuations by the token at a depth, without those that ended before."""
    if len(texts) == 1:  # as nearly always far down
        token = texts[0][depth]
        return {token: texts} if token >= 0 else {}
    groups: dict[int, Texts] = {}
    for text in texts:
        token = text[depth]
        if token >= 0:
            groups.setdefault(token, []).append(text)
    return groups
