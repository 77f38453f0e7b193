"""Token recycling: the tokens that the target found most probable are not thrown away.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling" (arXiv 2408.08696).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.core.options import Options, Reads
from outpace.core.proposal import Capabilities, Deterministic, DraftSampling, Needs, Proposal
from outpace.core.request import PerRequest, Request
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree_shape import MAX_SIBLINGS, TreeShape
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.branching import checked_branching, shape_of
from outpace.draft.ngrams import NgramPool
from outpace.draft.trees import TreeLevelsCache
from outpace.errors import ConfigError
from outpace.methods.lookup.datastore import Datastore, identity, read_datastore
from outpace.methods.lookup.dummy_datastore import dummy_datastore
from outpace.methods.lookup.table import NgramTable
from outpace.targets.hf.loading.loaded import LoadedModel

Successors = Callable[[int], Sequence[int]]
"""Returns the tokens that may follow a token, the most likely one first."""


class _Matrix:
    """The latest most probable successors of each token, over all requests."""

    def __init__(self, vocabulary: int, candidates: int, table: NgramTable | None = None) -> None:
        """table: what is known from the start."""
        self._size, self._table = (vocabulary, candidates), table
        self.clear()

    @property
    def known(self) -> NDArray[np.int32]:
        """``[V, k]``: the successors of each token; -1 where none is known."""
        return self._rows

    def after(self, token: int) -> list[int]:
        """Returns the successors of a token, the most probable one first."""
        return [each for each in self._rows[token].tolist() if each >= 0]

    def put(self, tokens: Sequence[int], successors: Sequence[Sequence[int]]) -> None:
        """Replaces the successors of these tokens; of equal tokens the last one counts."""
        if len(tokens):
            self._rows[list(tokens)] = successors

    def clear(self) -> None:
        """Forgets what was learned."""
        table = self._table
        self._rows = (
            np.full(self._size, -1, np.int32) if table is None else table.successors(*self._size)
        )

    def suggest(self, text: Sequence[int]) -> None:
        """Enters each token's successor in a text where none is known."""
        if len(text) > 1:
            tokens, following = np.array(text[:-1]), np.array(text[1:])
            new = self._rows[tokens, 0] < 0
            self._rows[tokens[new], 0] = following[new]

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes


@dataclass(frozen=True, kw_only=True)
class RecyclingOptions(Options):
    """What a user may set."""

    branching: Annotated[Any, Reads(checked_branching)] = "auto"
    """Children of a node at each depth, such as [3, 2, 1]; all nodes by their paths, such as
    [[0], [1], [0, 0]]; 'auto': as it pays."""
    datastore: Annotated[Any, Reads(read_datastore)] = None
    """The folder that `outpace datastore build` or `LLM.save_drafter` has written: its most
    frequent successors of each token are in the matrix from the start."""


class RecyclingDrafter(Drafter):
    """Drafts a tree from a matrix with the latest most probable successors of every token.

    The matrix is shared by all requests. It is written in every round, from the target's
    distributions at the root and at all drafted nodes, rejected ones too. A child of rank r is its
    parent's r-th successor; the draft ends at the first node that has none. Where nothing is known
    of a token, a prompt's own successor stands in.

    What the matrix holds depends on other requests. Rows whose text must follow from their own
    history alone draft from the successors in their own text instead, and where it has none of a
    token, from those of the datastore.
    """

    name: ClassVar[str] = "recycling"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    capabilities: Capabilities = Capabilities(stateless=True, saves=True)
    trees: bool = True
    default_rule: ClassVar[str] = "match"
    needs: Needs = Needs(softmax_probs=True)
    Options: ClassVar[type[Any]] = RecyclingOptions

    def __init__(
        self,
        vocabulary: int,
        device: torch.device,
        shape: TreeShape | None = None,
        datastore: Datastore | None = None,
        target: LoadedModel | None = None,
    ) -> None:
        """vocabulary: rows of the target's head; device: where rounds are run; shape: None for what
        `Rows.shape` says; target: the model whose tokens they are, without which nothing can be
        saved."""
        table = None if datastore is None else datastore.table
        self._target, self._table = target, table
        self.shape = shape
        self.capabilities = replace(self.capabilities, any_shape=shape is None)
        self._candidates = min(vocabulary, MAX_SIBLINGS if shape is None else shape.max_siblings)
        self._matrix = _Matrix(vocabulary, self._candidates, table)
        self._stored = None if table is None else _Matrix(vocabulary, self._candidates, table)
        self._own = PerRequest(lambda request: NgramPool(2, self._candidates))
        """Which tokens follow which in a text."""
        self._tree_levels = TreeLevelsCache(device)

    @classmethod
    def build(cls, setup: Setup) -> RecyclingDrafter:
        vocabulary = int(setup.loaded.config.vocab_size)
        given, shape = setup.options.datastore, shape_of(setup.options.branching)
        datastore = None if given is None else Datastore.for_target(given, setup.loaded)
        return cls(vocabulary, setup.target.device, shape, datastore, setup.loaded)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {"datastore": dummy_datastore(loaded).without_texts()}

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._matrix.suggest(request.token_ids)

    def forget_texts(self) -> None:
        self._matrix.clear()

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        shape = self.shape or rows.shape_of(max(budgets))
        drafts = [self._draft(rows, row, shape, budget) for row, budget in enumerate(budgets)]
        width = max(map(len, drafts))
        if not width:
            return Proposal.empty(len(rows), rows.seeds.device)
        device = rows.seeds.device
        counts = to_device([len(draft) for draft in drafts], device)
        tree = self._tree_levels.of(shape.first(width)).tree(len(rows))
        return Proposal(padded(drafts, device), tree, counts, Deterministic())

    def observe(self, round: Round) -> None:
        round = round.scored
        if round.softmax_probs is None:
            return
        top = round.softmax_probs.topk(self._candidates, -1)
        found = torch.where(top.values > 0, top.indices, -1).tolist()  # [B, M, k]
        drafted = round.proposal.tokens.tolist()
        for row, (successors, outcome) in enumerate(zip(found, round.outcomes, strict=True)):
            tokens = [round.rows.root(row), *drafted[row][: outcome.drafted]]
            # What was accepted is entered last: nothing replaces it.
            accepted = [0, *outcome.path]
            others = [node for node in range(len(tokens)) if node not in accepted]
            order = [*others, *accepted]
            self._matrix.put([tokens[n] for n in order], [successors[n] for n in order])

    def _draft(self, rows: Rows, row: int, shape: TreeShape, budget: int) -> list[int]:
        """Returns the first nodes of the shape, as far as their tokens are known."""
        if not budget:
            return []
        after = self._successors(rows, row)
        tokens = [rows.root(row)]
        candidates = [after(tokens[0])]
        ranks = [0] * (1 + shape.size)
        for parent in shape.parents[:budget]:
            if ranks[parent] >= len(candidates[parent]):
                break
            tokens.append(candidates[parent][ranks[parent]])
            candidates.append(after(tokens[-1]))
            ranks[parent] += 1
        return tokens[1:]

    def _successors(self, rows: Rows, row: int) -> Successors:
        if not rows.is_reproducible(row):
            return self._matrix.after
        own = self._own[rows.requests[row]]
        own.learn(rows.since(row, own.known))
        stored = self._stored

        def after(token: int) -> Sequence[int]:
            found = [successor for (successor,) in own.after(token)]
            return found if found or stored is None else stored.after(token)

        return after

    def save(self, folder: Path) -> None:
        """Writes a datastore with the table of the likeliest successors of each token, and what
        else a given one says of n-grams; without its texts."""
        if self._target is None or not (self._matrix.known >= 0).any():
            raise ConfigError(
                "the method 'recycling' has nothing to save: no text was written yet."
            )
        vocabulary, name, fingerprint = identity(self._target)
        known = self._matrix.known[:vocabulary]  # padding that was drafted has no name
        table = NgramTable.of_successors(np.where(known < vocabulary, known, -1))
        if self._table is not None:
            table = table.with_more(self._table)
        Datastore.of_table(table, vocabulary, name, fingerprint).save(folder)

    @property
    def nbytes(self) -> int:
        stored = 0 if self._stored is None else self._stored.nbytes
        return self._matrix.nbytes + stored + sum(own.nbytes for own in self._own.values())
