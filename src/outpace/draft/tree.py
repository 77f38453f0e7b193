"""A draft model proposes a tree: several candidates at each depth, all scored in one target pass.

SpecInfer (Miao et al. 2305.09781); multi-candidate speculative decoding (Yang et al. 2401.06706),
whose `k_config` this is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.law import Branches
from outpace.core.proposal import Drawn, Point, Proposal, Sampled
from outpace.core.rng import Role, gumbel, uniform
from outpace.core.tree import Tree
from outpace.core.urn import Urn
from outpace.draft.base import Rows, Setup
from outpace.draft.model import DraftModel
from outpace.errors import ConfigError
from outpace.models.runner import Runner


@dataclass(frozen=True)
class Shape:
    """Children per node at each depth: (4, 2) is 4 children of the root with 2 children each.

    Nodes are numbered level by level, siblings together.

    >>> Shape((2, 1)).parents
    [0, 0, 1, 2]
    """

    branching: tuple[int, ...]

    @property
    def levels(self) -> list[int]:
        """Nodes at each depth, from depth 1."""
        sizes, width = [], 1
        for count in self.branching:
            width *= count
            sizes.append(width)
        return sizes

    @property
    def size(self) -> int:
        return sum(self.levels)

    def levels_for(self, nodes: int) -> int:
        """Returns how many levels hold the first ``nodes`` nodes.

        >>> Shape((3, 2, 1)).levels_for(4)
        2
        """
        totals = itertools.accumulate(self.levels)
        return 1 + sum(total < nodes for total in totals)

    @property
    def parents(self) -> list[int]:
        listed: list[int] = []
        above = [0]
        for count in self.branching:
            listed += [parent for parent in above for _ in range(count)]
            above = list(range(len(listed) - len(above) * count + 1, len(listed) + 1))
        return listed


class Siblings:
    """Draws the children of each node of a level from the node's law.

    Sampled rows draw them one after another, with or without replacement; greedy and coupled rows
    take the most probable ones (coupled: after adding the noise of the target's own token).
    """

    def __init__(self, rows: Rows, nodes: int, with_replacement: bool) -> None:
        self._rows = rows
        self._with_replacement = with_replacement
        self.sampled = not (rows.coupled or rows.law.all_greedy)
        self._u = uniform(rows.seeds, rows.positions, Role.DRAFT, nodes)  # [B, N]

    def __call__(
        self, logits: Tensor, branches: Branches, count: int, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ``count`` children of each of W nodes ``[B, W * count]``, and their laws.

        logits, branches: of the W nodes. first: number of drafted nodes before these.
        """
        rows = self._rows
        if rows.law.all_greedy:
            scores = rows.law.adjusted(logits, branches, rows.history)
            return scores.topk(count, -1).indices.flatten(1), None
        q = rows.law(logits, branches, rows.history)  # [B, W, V]
        if rows.coupled:
            depth = branches.valid.sum(-1)  # [B, W]
            noise = gumbel(rows.seeds[:, None], rows.positions[:, None] + depth, q.shape[-1])
            return (q.double().log() + noise).topk(count, -1).indices.flatten(1), None
        u = self._u[:, first : first + q.shape[1] * count].view(*q.shape[:2], count)
        urn = Urn(q)
        tokens = urn.draw(u) if self._with_replacement else _one_by_one(urn, u)
        return tokens.flatten(1), q.repeat_interleave(count, 1)


def _one_by_one(urn: Urn, u: Tensor) -> Tensor:
    """``[B, W, count]``, without replacement. Once a law has no token left, its further children
    are token 0 with nothing behind them: their probability given their elders is 0, so no rule
    accepts them."""
    drawn = [urn.draw(u[..., :1])]
    for child in range(1, u.shape[-1]):
        urn.remove(drawn[-1])
        drawn.append(urn.draw(u[..., child : child + 1]))
    return torch.cat(drawn, -1)


class DraftTree(DraftModel):
    """Drafts a tree of fixed shape, one pass of the draft model per depth.

    A budget below the shape's size cuts nodes from the deepest level up.
    """

    name: ClassVar[str] = "draft_tree"
    draws: frozenset[Drawn] = frozenset({Drawn.WITHOUT})
    trees: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {
        **DraftModel.options,
        "branching": (3, 2, 1, 1),
        "with_replacement": False,
    }
    default_rule: ClassVar[str] = "recursive"

    def __init__(
        self,
        runner: Runner,
        vocabulary: int,
        shape: Shape,
        with_replacement: bool = False,
        weight_bytes: int = 0,
    ) -> None:
        super().__init__(runner, vocabulary, weight_bytes)
        self.shape = shape
        self.levels = shape.levels
        self._with_replacement = with_replacement
        self.draws = frozenset({Drawn.IID if with_replacement else Drawn.WITHOUT})

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        _shape(options["branching"])
        if not isinstance(options["with_replacement"], bool):
            given = options["with_replacement"]
            raise ConfigError(f"with_replacement must be true or false, not {given!r}.")

    @classmethod
    def build(cls, setup: Setup) -> DraftTree:
        """Loads ``model``; ``branching`` is the number of children at each depth, drawn
        ``with_replacement`` or not."""
        shape, again = _shape(setup.options["branching"]), setup.options["with_replacement"]
        chain = DraftModel.build(setup)
        return cls(chain.runner, setup.target.vocabulary, shape, again, chain.weight_bytes)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        depth = len(self.shape.branching)
        counts = [
            min(budget, self.shape.size)
            if rows.length(row) + depth <= self.runner.max_length
            else 0
            for row, budget in enumerate(budgets)
        ]
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        logits = self._catch_up(rows, [count > 0 for count in counts])[:, None]  # [B, 1, V]
        device = logits.device
        branching = self.shape.branching[: self.shape.levels_for(max(counts))]
        pick = Siblings(rows, self.shape.size, self._with_replacement)
        tokens = torch.zeros(len(rows), 0, dtype=torch.long, device=device)
        tree = self._tree(len(rows), 0)
        laws: list[Tensor] = []
        width = 1
        for level, count in enumerate(branching, 1):
            children, law = pick(logits, self._leading_to(tokens, tree, width), count, tree.size)
            tokens = torch.cat([tokens, children], 1)
            laws += [] if law is None else [law]
            width *= count
            tree = self._tree(len(rows), tokens.shape[1])
            if level < len(branching):
                output = self.runner.forward(tokens, keep=width, tree=tree)
                logits = self._fitted(output.logits)
        drawn = Sampled(torch.cat(laws, 1), self._with_replacement) if pick.sampled else Point()
        return Proposal(tokens, tree, torch.tensor(counts, device=device), drawn)

    def _shaped(self, rows: int, nodes: int) -> Tree:
        return Tree.uniform(self.shape.parents[:nodes], rows, self.runner.device)

    @staticmethod
    def _leading_to(tokens: Tensor, tree: Tree, width: int) -> Branches:
        """The branches of the last ``width`` nodes, the deepest level so far."""
        related = tree.ancestors[:, -width:, 1:]
        return Branches(tokens[:, None, :].expand(-1, width, -1), related)


def _shape(branching: object) -> Shape:
    listed = list(branching) if isinstance(branching, (list, tuple)) else []
    if not listed or any(not isinstance(count, int) or count < 1 for count in listed):
        raise ConfigError(
            "branching must list the children per node at each depth, such as [3, 2, 1], not "
            f"{branching!r}."
        )
    shape = Shape(tuple(listed))
    if shape.size > 256:
        raise ConfigError(
            f"branching {listed} makes {shape.size} nodes; at most 256 are scored at once."
        )
    return shape
