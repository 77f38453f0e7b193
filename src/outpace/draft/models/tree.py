"""A draft model proposes a tree: several candidates at each depth, all scored in one target pass.

SpecInfer (Miao et al. 2305.09781); multi-candidate speculative decoding (Yang et al. 2401.06706),
whose `k_config` this is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.categorical import Categorical
from outpace.core.law import Branches
from outpace.core.proposal import Drawn, Point, Proposal, Sampled
from outpace.core.rng import Role, gumbel, uniform
from outpace.core.transfer import to_device
from outpace.core.tree import Tree
from outpace.core.tree_shape import LARGEST, TreeShape
from outpace.draft.base import Rows, Setup
from outpace.draft.models.chain import AUTO, SAME, DraftModel, DraftModelOptions
from outpace.draft.options import option
from outpace.errors import ConfigError
from outpace.targets.hf.load import Loaded, check_same_vocabulary
from outpace.targets.hf.runner import Runner

PLANS = 64
"""Kept of the shapes that were drafted: a shape that is learned changes now and then."""


@dataclass(frozen=True, eq=False)
class _Level:
    """How the C nodes of one depth are drawn from the laws of the W nodes that have them."""

    most: int
    """Children of each of the W nodes that are drawn; some have fewer."""
    node: Tensor  # [W * most] drafted index (node - 1) of each child, 0 where there is none
    drawn: Tensor  # [C] where in these the children are that there are
    parent: Tensor  # [C] which of the W nodes each belongs to
    inner: Tensor  # [W'] which of the C have children themselves


class _TreePlan:
    """How a shape is drafted: a pass per depth, over the nodes that have children.

    Nodes are drawn level by level; ``order`` puts them where the shape has them.
    """

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        drafted = [node for level in shape.levels for node in level]
        self.order = None
        if drafted != sorted(drafted):
            at = {node: place for place, node in enumerate(drafted)}
            self.order = self._index(at[node] for node in sorted(drafted))
        self.levels = list(self._levels())
        inner = [node for node in drafted if shape.children[node]]
        number = {0: 0, **{node: place for place, node in enumerate(inner, 1)}}
        self._fed = [number[shape.parents[node - 1]] for node in inner]
        self._trees: dict[tuple[int, int | None], Tree] = {}

    def _levels(self) -> Iterator[_Level]:
        above: Sequence[int] = (0,)
        for nodes in self.shape.levels:
            children = [self.shape.children[node] for node in above]
            most = max(map(len, children))
            grid = [[*row, *[0] * (most - len(row))] for row in children]
            flat = [node for row in grid for node in row]
            above = [node for node in nodes if self.shape.children[node]]
            yield _Level(
                most,
                node=self._index(max(0, node - 1) for node in flat),
                drawn=self._index(place for place, node in enumerate(flat) if node),
                parent=self._index(place // most for place, node in enumerate(flat) if node),
                inner=self._index(nodes.index(node) for node in above),
            )

    def _index(self, values: Iterator[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self._device)

    def tree(self, rows: int, fed: int | None = None) -> Tree:
        """Returns the tree of so many rows, or that of its first so many nodes with children, as
        these are numbered among themselves: made once, with all that a tree derives."""
        if (rows, fed) not in self._trees:
            parents = self.shape.parents if fed is None else self._fed[:fed]
            self._trees[rows, fed] = Tree.uniform(list(parents), rows, self._device)
        return self._trees[rows, fed]

    def ordered(self, drafted: Sequence[Tensor]) -> Tensor:
        """Returns ``[B, N, ...]`` from the levels' ``[B, C, ...]``."""
        joined = torch.cat(list(drafted), 1)
        return joined if self.order is None else joined[:, self.order]


class Siblings:
    """Draws the children of each node of a level from the node's law.

    Sampled rows draw them one after another, with or without replacement; greedy and coupled rows
    take the most probable ones (coupled: after adding the noise of the target's own token).
    """

    def __init__(self, rows: Rows, nodes: int, with_replacement: bool, lane: int = 0) -> None:
        """nodes: of the whole draft. lane: the drafter's random streams."""
        self._rows = rows
        self._with_replacement = with_replacement
        self.sampled = not (rows.coupled or rows.law.all_greedy)
        if self.sampled:
            self._u = uniform(rows.seeds_of(lane), rows.positions, Role.DRAFT, nodes)  # [B, N]

    def __call__(
        self, logits: Tensor, branches: Branches, level: _Level
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the C nodes of a level ``[B, C]``, and their laws ``[B, C, V]``.

        logits, branches: of the W nodes that have them as children.
        """
        rows = self._rows
        if rows.law.all_greedy:
            scores = rows.law.adjusted(logits, branches, rows.history)
            return scores.topk(level.most, -1).indices.flatten(1)[:, level.drawn], None
        q = rows.law(logits, branches, rows.history)  # [B, W, V]
        if rows.coupled:
            depth = branches.valid.sum(-1)  # [B, W]
            noise = gumbel(rows.seeds[:, None], rows.positions[:, None] + depth, q.shape[-1])
            best = (q.double().log() + noise).topk(level.most, -1).indices
            return best.flatten(1)[:, level.drawn], None
        u = self._u[:, level.node].view(*q.shape[:2], level.most)
        urn = Categorical.of(q)
        tokens = urn.draw(u) if self._with_replacement else _one_by_one(urn, u)
        return tokens.flatten(1)[:, level.drawn], q[:, level.parent]


def _one_by_one(urn: Categorical, u: Tensor) -> Tensor:
    """``[B, W, count]``, without replacement. Once a law has no token left, its further children
    are token 0 with nothing behind them: their probability given their elders is 0, so no rule
    accepts them."""
    drawn = [urn.draw(u[..., :1])]
    for child in range(1, u.shape[-1]):
        urn.remove(drawn[-1])
        drawn.append(urn.draw(u[..., child : child + 1]))
    return torch.cat(drawn, -1)


@dataclass(frozen=True, kw_only=True)
class DraftTreeOptions(DraftModelOptions):
    """What a user may set."""

    branching: Any = option(
        "auto", "Children of a node at each depth, such as [3, 2, 1]; 'auto': as it pays."
    )
    with_replacement: bool = option(False, "Whether siblings may be the same token.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary not in (AUTO, SAME):
            raise ConfigError(
                f"draft_tree drafts with the target's own tokens: vocabulary {self.vocabulary!r} "
                "needs method 'draft_model'."
            )
        _shape(self.branching)
        if not isinstance(self.with_replacement, bool):
            given = self.with_replacement
            raise ConfigError(f"with_replacement must be true or false, not {given!r}.")


class DraftTree(DraftModel):
    """Drafts a tree, one pass of the draft model per depth.

    The budget's nodes are the first ones of the shape. ``branching`` gives it, level by level; with
    "auto" the controller does, node by node, as chances and prices are.
    """

    name: ClassVar[str] = "draft_tree"
    draws: frozenset[Drawn] = frozenset({Drawn.WITHOUT})
    trees: ClassVar[bool] = True
    Options: ClassVar[type[Any]] = DraftTreeOptions
    default_rule: ClassVar[str] = "recursive"

    def __init__(
        self,
        drafter: Loaded,
        runner: Runner,
        vocabulary: int,
        shape: TreeShape | None = None,
        with_replacement: bool = False,
    ) -> None:
        """shape: None for what `Rows.shape` says in each round."""
        super().__init__(drafter, runner, vocabulary)
        self.shape = shape
        self.any_shape = shape is None
        self._with_replacement = with_replacement
        self._plans: dict[TreeShape, _TreePlan] = {}
        self.draws = frozenset({Drawn.IID if with_replacement else Drawn.WITHOUT})

    @classmethod
    def build(cls, setup: Setup) -> DraftTree:
        """Loads ``model``; ``branching`` is the number of children at each depth or "auto", drawn
        ``with_replacement`` or not."""
        options, loaded = setup.options, cls._load(setup)
        check_same_vocabulary(setup.loaded, loaded)
        return cls(
            loaded,
            cls._runner(setup, loaded),
            setup.loaded.vocabulary,
            _shape(options.branching),
            options.with_replacement,
        )

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        return {**super().specimen(loaded), "branching": [2, 1, 1]}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        shape = self.shape or rows.shape or TreeShape.chain(max(budgets))
        room = self.runner.max_length // 2 >= shape.height
        counts = [min(budget, shape.size) if room else 0 for budget in budgets]
        for row, count in enumerate(counts):
            if count:
                self._make_room(row, rows.length(row), shape.height)
        shape = shape.first(max(counts))
        if shape.is_chain:
            return self._as_siblings(super().propose(rows, counts))
        plan = self._plan(shape)
        tokens, law = self._drawn(plan, rows, self._catch_up(rows, [count > 0 for count in counts]))
        given = to_device(counts, tokens.device)
        return Proposal(tokens, plan.tree(len(rows)), given, law)

    def _drawn(self, plan: _TreePlan, rows: Rows, logits: Tensor) -> tuple[Tensor, Point | Sampled]:
        """The nodes ``[B, N]`` and their law. logits: ``[B, V]``, at the root."""
        pick = Siblings(rows, plan.shape.size, self._with_replacement, self.lane)
        logits = logits[:, None]  # [B, W, V]
        fed = rows.seeds.new_empty(len(rows), 0)
        drafted, laws = [], []
        for level in plan.levels:
            tree = plan.tree(len(rows), fed.shape[1])
            tokens, law = pick(logits, _leading_to(fed, tree, logits.shape[1]), level)
            drafted.append(tokens)
            laws += [] if law is None else [law]
            if width := len(level.inner):
                fed = torch.cat([fed, tokens[:, level.inner]], 1)
                tree = plan.tree(len(rows), fed.shape[1])
                logits = self._vocabulary.logits(
                    self.runner.forward(fed, keep=width, tree=tree).logits
                )
        drawn = Sampled(plan.ordered(laws), self._with_replacement) if pick.sampled else Point()
        return plan.ordered(drafted), drawn

    def _as_siblings(self, proposal: Proposal) -> Proposal:
        """A chain, with a law that says how its tokens, had they any siblings, would be drawn."""
        law = proposal.law
        if isinstance(law, Point):
            return proposal
        return replace(proposal, law=replace(law, with_replacement=self._with_replacement))

    def _plan(self, shape: TreeShape) -> _TreePlan:
        if shape not in self._plans:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[shape] = _TreePlan(shape, self.runner.device)
        return self._plans[shape]


def _leading_to(tokens: Tensor, tree: Tree, width: int) -> Branches:
    """The branches of the last ``width`` nodes, the deepest level so far."""
    related = tree.ancestors[:, -width:, 1:]
    return Branches(tokens[:, None, :].expand(-1, width, -1), related)


def _shape(branching: object) -> TreeShape | None:
    if branching == "auto":
        return None
    listed = list(branching) if isinstance(branching, (list, tuple)) else []
    if not listed or any(not isinstance(count, int) or count < 1 for count in listed):
        raise ConfigError(
            "branching must be 'auto' or list the children per node at each depth, such as "
            f"[3, 2, 1], not {branching!r}."
        )
    shape = TreeShape.branching(listed)
    if shape.size > LARGEST:
        raise ConfigError(
            f"branching {listed} makes {shape.size} nodes; at most {LARGEST} are scored at once."
        )
    return shape
