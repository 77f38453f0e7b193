"""What does not go with ``batch_invariant``, refused when an engine is built."""

from __future__ import annotations

from outpace.draft.base import Drafter
from outpace.draft.route.base import Several
from outpace.errors import ConfigError
from outpace.targets.hf.invariant.target import InvariantTarget
from outpace.verify.base import Rule

REMEDIES = {
    "enable_prefix_caching": "leave enable_prefix_caching or batch_invariant out",
    "max_batch_total_tokens": "leave max_batch_total_tokens or batch_invariant out",
}
"""By the arguments of ``LLM`` that may have a text read again."""


def check_invariant(
    target: InvariantTarget, drafter: Drafter, rule: Rule, count: int | str, read_again: list[str]
) -> None:
    """Raises ``ConfigError`` for what would make passes of a target differ in more than what is in
    them.

    count: the drafted tokens that were asked for. read_again: the names of those arguments of
    ``LLM`` that were given and may have a text read again.
    """
    if read_again and not target.rereads:
        raise ConfigError(
            "a text that is read again would be computed in passes of another shape than those "
            f"that wrote it: {REMEDIES[read_again[0]]}."
        )
    if target.chains_only:
        _check_columns(drafter, rule)
    room = target.tokens // 2 if drafter.longest else target.tokens
    if target.rows > room:
        raise ConfigError(
            f"under batch_invariant a pass has room for {target.tokens} tokens here, which is too "
            f"few for {target.rows} texts at once: lower max_num_seqs to {room} or less."
        )
    most, shape = target.most_nodes, drafter.shape
    nodes = max(0 if isinstance(count, str) else count, 0 if shape is None else shape.size)
    if nodes > most:
        raise ConfigError(
            f"under batch_invariant a pass scores {most} drafted tokens of a text at most here, "
            f"not {nodes}: draft fewer{_fewer_rows(target, nodes)}."
        )


def _fewer_rows(target: InvariantTarget, nodes: int) -> str:
    """What else would help, as the end of a sentence."""
    rows = target.tokens // (nodes + 1)
    return f", or lower max_num_seqs to {rows}" if rows and not target.chains_only else ""


def _check_columns(drafter: Drafter, rule: Rule) -> None:
    """Refuses what lays other columns into a pass than a chain's."""
    children = drafter.children if isinstance(drafter, Several) else []
    for child in children:
        _check_columns(child, rule)
    reason = None
    if drafter.rides:
        reason = f"method={drafter.name!r} has columns of its own in the target's passes"
    elif drafter.trees and not (children or drafter.any_shape):
        reason = f"method={drafter.name!r} drafts trees here, whose tokens lie apart in the cache"
    elif rule.needs.second_pass is not None:
        reason = f"verify={rule.name!r} has the draft scored twice"
    if reason is not None:
        raise ConfigError(
            f"{reason}, and the passes of batch_invariant score chains only: choose another one, "
            "or leave batch_invariant out."
        )
