"""A draft model proposes a tree: several candidates at each depth, all scored in one target pass.

SpecInfer (Miao et al. 2305.09781); multi-candidate speculative decoding (Yang et al. 2401.06706),
whose `k_config` this is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outpace.core.proposal import Capabilities, Deterministic, DraftSampling, Proposal
from outpace.core.trees.tree_shape import TreeShape
from outpace.core.values import shown
from outpace.draft.base import Rows, Setup
from outpace.draft.branching import TreeOptions, shape_of
from outpace.draft.dynamic import MAX_DYNAMIC_NODES, DynamicTrees
from outpace.draft.trees import draw_tree
from outpace.errors import ConfigError
from outpace.heads.classifiers import ModelSignature
from outpace.methods.models.draft_model import DraftModel
from outpace.methods.models.images import ImageAccess
from outpace.methods.models.options import AUTO, SAME, DraftModelOptions
from outpace.targets.hf.loading.loaded import LoadedModel, check_same_vocabulary
from outpace.targets.hf.runner import Runner


@dataclass(frozen=True, kw_only=True)
class DraftTreeOptions(TreeOptions, DraftModelOptions):
    """What a user may set."""

    with_replacement: bool = False
    """Whether siblings may be the same token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary not in (AUTO, SAME):
            raise ConfigError(
                "draft_tree drafts with the target's own tokens: vocabulary "
                f"{shown(self.vocabulary)} needs method 'draft_model'."
            )
        if self.dynamic_trees is not None and self.with_replacement:
            raise ConfigError(
                "with_replacement is about siblings that are drawn, and those of a dynamic tree "
                "are chosen: leave it out, or name another branching."
            )


class DraftTree(DraftModel):
    """Drafts a tree, one pass of the draft model per depth.

    The budget's nodes are the first ones of the shape. ``branching`` gives it, level by level or
    node by node; with "auto" the controller does, as chances and costs are. With "dynamic" they are
    the nodes that the model finds most probable, another tree in every row, as EAGLE-2's head does
    it (Li et al. 2024, arXiv 2406.16858).
    """

    name: ClassVar[str] = "draft_tree"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.WITHOUT_REPLACEMENT})
    trees: bool = True
    capabilities: Capabilities = replace(DraftModel.capabilities, supports_early_stop=False)
    Options: ClassVar[type[Any]] = DraftTreeOptions
    default_rule: ClassVar[str] = "recursive"
    _dynamic_trees: DynamicTrees | None = None
    """How dynamic trees grow, if they are dynamic."""

    def __init__(
        self,
        drafter: LoadedModel,
        runner: Runner,
        vocabulary: int,
        images: ImageAccess,
        shape: TreeShape | None = None,
        with_replacement: bool = False,
        dynamic_trees: DynamicTrees | None = None,
    ) -> None:
        """shape: None for what `Rows.shape` says in each round. dynamic_trees: which have
        no shape."""
        super().__init__(drafter, runner, vocabulary, images)
        self.shape = shape
        left_open = shape is None and dynamic_trees is None
        self.capabilities = replace(self.capabilities, any_shape=left_open)
        self._with_replacement = with_replacement
        self.sampling_kinds = frozenset(
            {DraftSampling.IID if with_replacement else DraftSampling.WITHOUT_REPLACEMENT}
        )
        if dynamic_trees is not None:
            self.sampling_kinds = frozenset({DraftSampling.DETERMINISTIC})
            self.max_draft_tokens = MAX_DYNAMIC_NODES
            # No draft is longer than what a window leaves free for it.
            self._dynamic_trees = DynamicTrees(
                dynamic_trees.top_k, min(dynamic_trees.depth, self._reserve)
            )

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        return cls.default_rule if options.dynamic_trees is None else "match"

    @classmethod
    def _built(cls, setup: Setup) -> DraftModel:
        """Loads ``model``; ``branching`` gives the shape, or is "auto" or "dynamic"; children are
        drawn ``with_replacement`` or not."""
        options, loaded = setup.options, cls._load(setup)
        check_same_vocabulary(setup.loaded, loaded)
        runner, vocabulary = cls._runner(setup, loaded), setup.loaded.vocabulary
        images = ImageAccess(setup.loaded, loaded, options.images)
        shape = shape_of(options.branching) if options.dynamic_trees is None else None
        how = shape, options.with_replacement, options.dynamic_trees
        return cls(loaded, runner, vocabulary, images, *how)

    def model_signature(self) -> ModelSignature | None:
        return None

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {**super().dummy_options(loaded), "branching": [2, 1, 1]}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        if self._dynamic_trees is not None:
            return self._propose_dynamic(rows, budgets, self._dynamic_trees)
        shape = self.shape or rows.shape_of(max(budgets))
        shape = shape.up_to(self._reserve)
        counts = [min(budget, shape.size) for budget in self._update(rows, budgets)]
        self._make_all_room(counts)
        shape = shape.first(max(counts))
        if shape.is_chain:
            return self._as_siblings(super().propose(rows, counts))
        tree_levels = self._tree_levels.of(shape)
        logits = self._catch_up([count > 0 for count in counts])
        return draw_tree(
            tree_levels,
            rows,
            logits,
            self._next_logits,
            counts,
            random_stream=self.random_stream,
            with_replacement=self._with_replacement,
        )

    def _propose_dynamic(self, rows: Rows, budgets: Sequence[int], trees: DynamicTrees) -> Proposal:
        """Drafts levels for as long as some node of them is among the best."""
        budgets = self._update(rows, budgets)
        if not any(budgets) or not trees.depth:
            return Proposal.empty(len(rows), rows.seeds.device)
        self._make_all_room(budgets)
        logits = self._catch_up([budget > 0 for budget in budgets])
        return trees(rows, logits, self._next_logits, budgets)

    def _as_siblings(self, proposal: Proposal) -> Proposal:
        """A chain, with a distribution that says how its tokens, had they any siblings, would be
        drawn."""
        distribution = proposal.distribution
        if isinstance(distribution, Deterministic):
            return proposal
        return replace(
            proposal, distribution=replace(distribution, with_replacement=self._with_replacement)
        )
