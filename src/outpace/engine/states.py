"""Hidden states on their way from the target to a drafter: of every committed token, once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.transfer import padded
from outpace.draft.base import Drafter
from outpace.engine.verifier import Decision
from outpace.targets.base import ReadPart, Scores, States


def deliver_part(drafter: Drafter, part: ReadPart) -> None:
    """Gives a drafter what it needs of a part of the prompts."""
    if drafter.needs.states:
        drafter.read(part.rows, part.tokens, _side_by_side(part.states, drafter))


def deliver_round(
    drafter: Drafter,
    scores: Scores,
    pending: Sequence[Sequence[int]],
    decisions: Sequence[Decision],
) -> None:
    """Gives a drafter what it needs of a round: each row's tokens that were pending and the path
    that was accepted after them."""
    if not drafter.needs.states:
        return
    root = len(pending[0]) - 1
    states = _side_by_side(scores.states, drafter)  # [B, P + N, H]
    columns = [[*range(root + 1), *(root + node for node in one.path)] for one in decisions]
    longest = max(map(len, columns))
    if longest > root + 1:
        index = padded(columns, states.device)[..., None].expand(-1, -1, states.shape[-1])
        states = states.gather(1, index)
    tokens = [[*before, *one.accepted] for before, one in zip(pending, decisions, strict=True)]
    drafter.read(range(len(tokens)), tokens, states[:, :longest])


def _side_by_side(states: States, drafter: Drafter) -> Tensor:
    return torch.cat([states[layer] for layer in drafter.needs.states], -1)
