"""What does not go with ``batch_invariant``, refused when an engine is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outpace.draft.base import Drafter
from outpace.draft.route.base import Several
from outpace.errors import ConfigError
from outpace.targets.hf.target import HFTarget
from outpace.verify.base import Rule

REMEDIES = {
    "enable_prefix_caching": "leave enable_prefix_caching or batch_invariant out",
    "max_batch_total_tokens": "leave max_batch_total_tokens or batch_invariant out",
}
"""By the arguments of ``LLM`` that may have a text read again."""


def check_invariant(
    target: HFTarget,
    drafter: Drafter,
    rule: Rule,
    second_text: Sequence[int],
    count: int | str,
    read_again: list[str],
) -> None:
    """Raises ``ConfigError`` for what would make passes of a target differ in more than what is in
    them, and lets the target score no more nodes than there is room for with other columns.

    second_text: the tokens between the two copies of a draft, for a rule that has it scored twice.
    count: the drafted tokens that were asked for. read_again: the names of those arguments of
    ``LLM`` that were given and may have a text read again.
    """
    alike = target.invariance
    assert alike is not None
    if read_again and not alike.rereads:
        raise ConfigError(
            "a text that is read again would be computed in passes of another shape than those "
            f"that wrote it: {REMEDIES[read_again[0]]}."
        )
    if target.chains_only:
        _check_columns(drafter, rule)
    elif drafter.longest:
        _leave_room(target, alike.tokens, lambda n: _columns(n, drafter, rule, second_text))
    room = alike.tokens // 2 if drafter.longest else alike.tokens
    if target.rows > room:
        raise ConfigError(
            f"under batch_invariant a pass has room for {alike.tokens} tokens here, which is too "
            f"few for {target.rows} texts at once: lower max_num_seqs to {room} or less."
        )
    most, shape = target.most_nodes, drafter.shape
    nodes = max(0 if isinstance(count, str) else count, 0 if shape is None else shape.size)
    if nodes > most:
        raise ConfigError(
            f"under batch_invariant a pass scores {most} drafted tokens of a text at most here, "
            f"not {nodes}: draft fewer{_fewer_rows(target, alike.tokens, nodes)}."
        )


def _leave_room(target: HFTarget, tokens: int, columns: Callable[[int], int]) -> None:
    """Lets a target score no more nodes than a pass has room for with other columns.
    tokens: of a pass, at most. columns: those that a row takes with n nodes."""
    least = columns(1)
    if least * target.rows > tokens and least > 2:
        fewer = tokens // least
        remedy = f"lower max_num_seqs to {fewer} or less" if fewer else "leave batch_invariant out"
        raise ConfigError(
            f"under batch_invariant a pass has room for {tokens} tokens here, and each text "
            f"takes {least} with one drafted token and what is scored beside it: {remedy}."
        )
    while target.most_nodes > 1 and columns(target.most_nodes) * target.rows > tokens:
        target.most_nodes -= 1


def _columns(nodes: int, drafter: Drafter, rule: Rule, second_text: Sequence[int]) -> int:
    """Columns of a pass that a row with n nodes takes, with those that ride and, for a rule
    that has the draft scored twice, with the second copy."""
    if rule.needs.second_pass is not None:
        return 1 + 2 * nodes + len(second_text)
    per_row, per_node = _aux_tokens(drafter)
    return per_row + (1 + nodes) * (1 + per_node)


def _aux_tokens(drafter: Drafter) -> tuple[int, int]:
    """Columns that ride in a row, and those after the root and each node, at most."""
    children = drafter.children if isinstance(drafter, Several) else []
    found = [(drafter.aux_per_row, drafter.aux_per_node), *map(_aux_tokens, children)]
    return max(row for row, _ in found), max(node for _, node in found)


def _fewer_rows(target: HFTarget, tokens: int, nodes: int) -> str:
    """What else would help, as the end of a sentence."""
    rows = tokens // (nodes + 1)
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
