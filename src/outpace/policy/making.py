"""From ``speculative_config`` to a controller."""

from __future__ import annotations

from typing import Any

from outpace.config import SpeculativeConfig
from outpace.core.trees.tree_shape import MAX_SIBLINGS, TreeShape
from outpace.draft.base import Drafter
from outpace.errors import ConfigError
from outpace.policy.acceptance import PRIOR, PRIOR_OF_LOOK_UPS
from outpace.policy.auto import AutoController
from outpace.policy.base import Controller
from outpace.policy.estimator import Estimator
from outpace.policy.lengths.adaptive import Constant
from outpace.policy.lengths.registry import find_length, length_names
from outpace.policy.nominal import DRAFT_OVERHEAD, NominalCosts
from outpace.policy.shapes import MAX_GROWN_NODES, DraftSizes, GrownTrees, best_of_size
from outpace.targets.base import Target


def make_controller(
    config: SpeculativeConfig, length: Any, drafter: Drafter, target: Target
) -> Controller:
    """Returns the controller that ``num_speculative_tokens`` and ``length`` ask for.

    length: an instance of the length policy's ``Options``, where there is one. Raises
    ``ConfigError`` for a policy that does not go with the drafter.
    """
    count = config.num_speculative_tokens
    if drafter.file is not None and (config.length is not None or count != "auto"):
        named = "length" if config.length is not None else "num_speculative_tokens"
        raise ConfigError(
            f"'state' keeps what is learned for choosing by measured rounds, and with {named} "
            "nothing is chosen so: leave one of the two out."
        )
    if config.length is not None:
        return _by_name(config, length, drafter, target)
    if not drafter.max_draft_tokens:
        return Constant.without_drafter()
    if count != "auto":
        return Constant(count, shape=_shape(drafter, target, count))
    children = drafter.candidate_drafters.values() or [drafter]
    estimators = [_estimator(child, target) for child in children]
    return AutoController(sorted(estimators, key=lambda one: not one.look_up), drafter.file)


def _nominal(drafter: Drafter, target: Target) -> NominalCosts:
    kind = target.device.type
    read, aux, experts = target.pass_bytes, drafter.aux_per_node, target.expert_bytes
    return NominalCosts.of(drafter.pass_bytes, read, kind, aux, experts)


def _estimator(drafter: Drafter, target: Target) -> Estimator:
    can = drafter.capabilities
    return Estimator(
        drafter.name,
        _drafts(drafter, target),
        _nominal(drafter, target),
        prior=PRIOR if drafter.pass_bytes or can.any_shape else PRIOR_OF_LOOK_UPS,
        look_up=not (drafter.pass_bytes or can.uses_aux_tokens),
        needs_no_prefill=can.needs_no_prefill,
        can_stop_early=_stops(drafter, target),
        skips_reproducible=can.skips_reproducible,
    )


def _stops(drafter: Drafter, target: Target) -> bool:
    """Whether chains may end by the drafter's probabilities of its tokens. On a GPU the host would
    have to wait for each token. On a CPU looking at one takes some .15 ms, which pays only where a
    pass of the drafter takes longer than drafting costs besides its passes."""
    can = drafter.capabilities
    if not can.supports_early_stop or can.joins_drafts or target.device.type != "cpu":
        return False
    return drafter.pass_bytes > DRAFT_OVERHEAD


def _drafts(drafter: Drafter, target: Target) -> DraftSizes | GrownTrees:
    """The chains or trees that a controller may choose from."""
    most = target.max_nodes
    if drafter.capabilities.any_shape:
        most, siblings = min(most, MAX_GROWN_NODES), _siblings(target)
        return GrownTrees(_nominal(drafter, target), most, drafter.max_depth, siblings)
    if drafter.shape is None:
        return DraftSizes.chains(min(most, drafter.max_draft_tokens))
    return DraftSizes.by_level(drafter.shape)


def _siblings(target: Target) -> int:
    """Children of a node of a tree, at most: one where the target scores chains only."""
    return 1 if target.chains_only else MAX_SIBLINGS


def _by_name(
    config: SpeculativeConfig, options: Any, drafter: Drafter, target: Target
) -> Controller:
    name = config.length_name or ""
    kind = find_length(name)
    if not drafter.max_draft_tokens:
        raise ConfigError(f"length={name!r} has nothing to choose: plain decoding drafts nothing.")
    if kind.can_stop_early and not drafter.capabilities.supports_early_stop:
        others = ", ".join(repr(n) for n in length_names() if not find_length(n).can_stop_early)
        raise ConfigError(
            f"length={name!r} ends chains by the drafter's distributions, and "
            f"method={drafter.name!r} has no chains with distributions: choose another length "
            f"({others}) or 'draft_model'."
        )
    count = config.num_speculative_tokens
    if count == 0:
        raise ConfigError(
            f"length={name!r} chooses how much is drafted, and num_speculative_tokens=0 says that "
            "nothing is: leave one of them out."
        )
    policy = kind(kind.default_count if count == "auto" else count, options)
    policy.check_drafter(drafter)
    return policy.shaped(_shape(drafter, target, policy.most))


def _shape(drafter: Drafter, target: Target, most: int) -> TreeShape | None:
    """The tree of which drafts are the first nodes, if the drafter leaves that open."""
    if not drafter.capabilities.any_shape:
        return None
    return best_of_size(most, _nominal(drafter, target), drafter.max_depth, _siblings(target))
