"""Sees what an engine's rule sees: the target's law at every node, and what had been committed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.law import RowOptions
from outpace.engine.trace import RoundTrace
from outpace.engine.verifier import branches_of


@dataclass(frozen=True, eq=False)
class SeenLaws:
    """The laws of one round, a line per row and node: the root and all drafted nodes but
    padding."""

    laws: Tensor  # [R, V]
    prompts: list[list[int]]
    outputs: list[list[int]]  # committed, then drafted up to the node
    drafted: list[int]  # how many of them are drafted
    options: list[RowOptions]


class Spy:
    """An observer of an engine that keeps the laws that entered its rule."""

    def __init__(self) -> None:
        self.rounds: list[SeenLaws] = []

    def __call__(self, trace: RoundTrace) -> None:
        if trace.laws is None:
            return
        proposal, history = trace.proposal, trace.rows.history
        branches = branches_of(proposal)
        root = proposal.valid.new_ones(proposal.tree.rows, 1)
        real = torch.cat([root, proposal.valid], 1).nonzero().tolist()
        paths = [
            branches.tokens[row, node][branches.valid[row, node]].tolist() for row, node in real
        ]
        lengths = trace.rows.lengths
        prompts = [list(history.prompts[row]) for row, _ in real]
        committed = [
            trace.rows.since(row, len(history.prompts[row])) for row in range(len(lengths))
        ]
        self.rounds.append(
            SeenLaws(
                torch.stack([trace.laws[row, node] for row, node in real]).clone(),
                prompts,
                [[*committed[row], *path] for (row, _), path in zip(real, paths, strict=True)],
                [len(path) for path in paths],
                [trace.requests[row].options for row, _ in real],
            )
        )
