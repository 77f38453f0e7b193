"""Sees what an engine's rule sees: the target's law at every node, and what had been committed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.core.law import RowOptions
from outpace.core.proposal import Proposal
from outpace.engine.verifier import branches_of
from outpace.verify.base import Rule

if TYPE_CHECKING:
    from outpace.engine.engine import Engine


@dataclass(frozen=True, eq=False)
class Round:
    """The laws of one round, a line per row and node: the root and all drafted nodes but
    padding."""

    laws: Tensor  # [R, V]
    prompts: list[list[int]]
    outputs: list[list[int]]  # committed, then drafted up to the node
    drafted: list[int]  # how many of them are drafted
    options: list[RowOptions]


class Spy:
    """Puts itself between an engine and its rule; changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self.rounds: list[Round] = []
        self._engine = engine
        engine.verifier = replace(engine.verifier, rule=self._watched(engine.verifier.rule))

    def _watched(self, rule: Rule) -> Rule:
        kind: Any = type(rule)
        see = self._see

        def stop(self: Any, p: Tensor, proposal: Proposal) -> Tensor:
            see(p, proposal)
            law: Tensor = kind.stop(self, p, proposal)
            return law

        # A subclass of the rule, so that nobody who asks what it is gets another answer.
        watched = copy.copy(rule)
        object.__setattr__(watched, "__class__", type(kind.__name__, (kind,), {"stop": stop}))
        return watched

    def _see(self, p: Tensor, proposal: Proposal) -> None:
        branches = branches_of(proposal)
        root = proposal.valid.new_ones(proposal.tree.rows, 1)
        real = torch.cat([root, proposal.valid], 1).nonzero().tolist()
        requests = self._engine.running
        paths = [
            branches.tokens[row, node][branches.valid[row, node]].tolist() for row, node in real
        ]
        self.rounds.append(
            Round(
                torch.stack([p[row, node] for row, node in real]).clone(),
                [requests[row].prompt_ids for row, _ in real],
                [
                    [*requests[row].output_ids, *path]
                    for (row, _), path in zip(real, paths, strict=True)
                ],
                [len(path) for path in paths],
                [requests[row].options for row, _ in real],
            )
        )
