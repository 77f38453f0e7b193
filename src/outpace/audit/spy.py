"""Sees what an engine's rule sees: the target's distribution at every node, and what had been
committed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.logits_pipeline import RowOptions
from outpace.engine.trace import RoundTrace
from outpace.engine.verifier import branches_of


@dataclass(frozen=True)
class DeadEnd:
    """A drafted node that has no distribution."""

    prompt: list[int]
    output: list[int]
    options: RowOptions


@dataclass(frozen=True, eq=False)
class SeenProbs:
    """The distributions of one round, a line per row and node: the root and all drafted nodes but
    padding and dead ends."""

    probs: Tensor  # [R, V]
    prompts: list[list[int]]
    outputs: list[list[int]]  # committed, then drafted up to the node
    drafted: list[int]  # how many of them are drafted
    options: list[RowOptions]
    dead_ends: list[DeadEnd]


class Spy:
    """An observer of an engine that keeps the distributions that entered its rule."""

    def __init__(self) -> None:
        self.rounds: list[SeenProbs] = []

    def __call__(self, trace: RoundTrace) -> None:
        if trace.probs is None:
            return
        proposal = trace.proposal
        branches = branches_of(proposal)
        root = proposal.valid.new_ones(proposal.tree.rows, 1)
        prompts = trace.rows.history.prompts
        committed = [trace.rows.since(row, len(prompt)) for row, prompt in enumerate(prompts)]
        possible: list[tuple[int, int, list[int]]] = []  # row, node, drafted tokens
        dead_ends = []
        for row, node in torch.cat([root, proposal.valid], 1).nonzero().tolist():
            path = branches.tokens[row, node][branches.valid[row, node]].tolist()
            if node in trace.dead_ends.get(row, {}):
                options = trace.requests[row].options
                output = [*committed[row], *path]
                dead_ends.append(DeadEnd(list(prompts[row]), output, options))
            else:
                possible.append((row, node, path))
        self.rounds.append(
            SeenProbs(
                torch.stack([trace.probs[row, node] for row, node, _ in possible]).clone(),
                [list(prompts[row]) for row, _, _ in possible],
                [[*committed[row], *path] for row, _, path in possible],
                [len(path) for _, _, path in possible],
                [trace.requests[row].options for row, _, _ in possible],
                dead_ends,
            )
        )
