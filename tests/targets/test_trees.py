"""Trees scored through the slot cache equal plain forwards of each root-to-node path."""

from __future__ import annotations

import random

import pytest
import torch

from devices import on_device
from outpace.core.trees.tree import Tree
from outpace.targets.hf import support, trials
from outpace.targets.hf.runner import Runner

from .families import CONTEXT, FAMILIES, VOCABULARY, target

TOLERANCE = 1e-5
"""Norms and rotary angles are rounded to float32 on the way; a wrong mask is off by over 1e-2."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts(family: str) -> None:
    support.check(target(family))
    trials.probe(target(family))


class Rows:
    """The committed tokens of some rows, scored and advanced by random trees."""

    def __init__(self, family: str, lengths: list[int], seed: int = 0) -> None:
        self.model = target(family)
        self.dice = random.Random(seed)
        self.sequences = [self.tokens(length) for length in lengths]
        self.runner = Runner(self.model, len(lengths), CONTEXT)
        self.runner.admit(len(lengths))
        self.runner.prefill(0, [sequence[:-1] for sequence in self.sequences])

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(VOCABULARY) for _ in range(count)]

    def round(self, size: int) -> float:
        """Scores and accepts; returns how far any node was off."""
        rows = range(len(self.sequences))
        parents = [[self.dice.randint(0, node) for node in range(size)] for _ in rows]
        drafted = [self.tokens(size) for _ in rows]
        fed = [[self.sequences[row][-1], *drafted[row]] for row in rows]
        tree = Tree(on_device(parents))
        logits = self.runner.forward(on_device(fed), keep=size + 1, tree=tree).logits
        worst = 0.0
        accepted = []
        for row in rows:
            paths = [self._path(parents[row], node) for node in range(size + 1)]
            for node, path in enumerate(paths):
                plain = self._plain(row, [drafted[row][n - 1] for n in path])
                off = (logits[row, node] - plain).abs().max() / plain.std()
                worst = max(worst, float(off))
            accepted.append(self.dice.choice(paths))
        self._commit(accepted, drafted)
        return worst

    def _commit(self, accepted: list[list[int]], drafted: list[list[int]]) -> None:
        self.runner.advance_paths(1, accepted)
        for row, path in enumerate(accepted):
            self.sequences[row] += [drafted[row][node - 1] for node in path]
            self.sequences[row] += self.tokens(1)

    def _plain(self, row: int, path: list[int]) -> torch.Tensor:
        ids = on_device([[*self.sequences[row], *path]])
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits[0, -1]

    @staticmethod
    def _path(parents: list[int], node: int) -> list[int]:
        path: list[int] = []
        while node > 0:
            path.insert(0, node)
            node = parents[node - 1]
        return path


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rounds_of_random_trees_equal_plain_forwards(family: str) -> None:
    rows = Rows(family, lengths=[9, 2])
    for size in (4, 3):
        assert rows.round(size) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "deepseek_v3"])
@torch.inference_mode()
def test_many_rounds_of_larger_trees(family: str) -> None:
    rows = Rows(family, lengths=[1, 13, 5], seed=1)
    for size in (1, 7, 2, 6):
        assert rows.round(size) < TOLERANCE


@torch.inference_mode()
def test_a_tree_and_a_chain_of_the_same_tokens_agree() -> None:
    rows = Rows("mistral", lengths=[9, 2])
    tokens = on_device([[3, 4, 5, 6], [7, 8, 9, 10]])
    chain = rows.runner.forward(tokens, keep=4, tree=Tree.chain(2, 3)).logits
    tree = rows.runner.forward(tokens, keep=4, tree=Tree(on_device([[0, 1, 2]] * 2))).logits
    assert torch.allclose(chain, tree, atol=1e-12)
