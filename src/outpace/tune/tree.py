"""The search for the draft tree with the most tokens per second, by rounds of a user's own model.

Sequoia (Chen et al. 2024, arXiv 2402.12374): the chances of siblings to be accepted are measured
once, and the best tree for them is found by dynamic programming (`core.trees.best_shape`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from outpace.core.params import SamplingParams
from outpace.core.stats import Seconds
from outpace.core.trees.best_shape import BestShapes, best_shape
from outpace.core.trees.tree_shape import MAX_SIBLINGS, AcceptanceProbs, TreeShape
from outpace.draft.base import Round
from outpace.errors import ConfigError
from outpace.llm import LLM
from outpace.policy.acceptance import Acceptance
from outpace.policy.lengths.adaptive import Constant

FORKED = 8
"""Levels of the probe of which the nodes have siblings; deeper ones are hardly ever reached."""


def probe(levels: int, siblings: int = MAX_SIBLINGS) -> TreeShape:
    """Returns the tree that shows what becomes of all ranks at all depths: a chain of which each
    token, down to some depth, has siblings, and each of these two descendants.

    >>> probe(2, siblings=2).parents
    (0, 0, 1, 1, 2)
    """
    parents: list[int] = []
    spine, beside = 0, []
    for depth in range(levels):
        parents.append(spine)
        eldest = len(parents)
        for _ in range(siblings - 1 if depth < FORKED else 0):
            parents.append(spine)
            beside.append((len(parents), depth + 1))
        spine = eldest
    for node, depth in beside:
        for _ in range(min(2, levels - depth)):
            parents.append(node)
            node = len(parents)
    return TreeShape(tuple(parents))


@dataclass(frozen=True)
class FoundTree:
    """The best tree, and what it promises compared with the best chain and plain decoding."""

    shape: TreeShape
    tokens: float
    """Tokens of a pass of the target, on average."""
    tokens_per_second: float
    of_chain: float
    """Tokens per second of the best chain."""
    plain: float
    """Tokens per second of plain decoding."""


class TreeTrials:
    """Plays rounds of one model with trees of given shapes, one prompt at a time."""

    def __init__(self, llm: LLM, prompts: Sequence[str], tokens: int, temperature: float) -> None:
        """llm: with a drafter that can draft any tree. tokens: of each text. Raises
        ``ConfigError`` for another drafter."""
        drafter = llm.engine.drafter
        if not drafter.capabilities.any_shape or drafter.candidate_drafters:
            raise ConfigError(
                f"method {drafter.name!r} does not draft trees of any shape: use 'draft_tree', or "
                "a trained head that drafts trees, with 'branching' left at 'auto'."
            )
        self._llm, self._prompts = llm, list(prompts)
        self._tokens, self._temperature = tokens, temperature
        self._deepest = drafter.max_depth
        self._acceptance = Acceptance()
        self._seconds: dict[int, list[Seconds]] = defaultdict(list)  # by nodes
        self._levels: list[float] = []  # seconds of a level

    def play(self, nodes: int, levels: int) -> Iterator[float]:
        """Plays all that has to be known of trees of at most these nodes and levels; yields the
        share that is done."""
        levels = min(levels, self._deepest or levels)
        widths = [0, *_doubling(nodes)]
        total = 1 + len(widths)
        self._play(probe(levels))
        yield 1 / total
        chances = self.chances(levels)
        for done, width in enumerate(widths, 2):
            self._play(BestShapes(width, levels, chances).shape(width) if width else None)
            yield done / total

    def best(self, nodes: int, levels: int) -> FoundTree:
        """Returns the best tree of at most these nodes and levels; the best chain where nothing is
        faster than plain decoding."""
        levels = min(levels, self._deepest or levels)
        chances, scored = self.chances(levels), self._scored()
        level = median(self._levels)

        def cost(count: int, depth: int) -> float:
            return depth * level + float(np.interp(count, list(scored), list(scored.values())))

        def speed(shape: TreeShape) -> float:
            tokens = 1 + sum(shape.reached(chances))
            return tokens / cost(shape.size, shape.height)

        chains = [TreeShape.chain(count) for count in range(1, min(nodes, levels) + 1)]
        chain, shape = max(chains, key=speed), best_shape(nodes, chances, cost)
        shape = shape if shape.size else chain
        tokens = 1 + sum(shape.reached(chances))
        return FoundTree(shape, tokens, speed(shape), speed(chain), 1 / cost(0, 0))

    def chances(self, levels: int) -> AcceptanceProbs:
        """Returns the chances of siblings by depth and rank, as far as they were seen."""
        return self._acceptance.typical(levels, MAX_SIBLINGS)

    def _scored(self) -> Mapping[int, float]:
        """The seconds of a round without its drafting, by nodes, ascending and never falling."""
        found, most = {}, 0.0
        for nodes in sorted(self._seconds):
            took = median(seconds.score + seconds.rest for seconds in self._seconds[nodes])
            most = found[nodes] = max(most, took)
        return found

    def _play(self, shape: TreeShape | None) -> None:
        """Writes all texts with drafts of one shape, or plainly; ``ConfigError`` where no round
        drafts all of it."""
        engine, size = self._llm.engine, shape.size if shape else 0
        request = self._acceptance.new()

        def note(round: Round) -> None:
            (outcome,) = round.outcomes
            if outcome.drafted != size:
                return  # near the end of the context, where part of the draft is cut off
            if len(round.requests[0].output_ids) == outcome.emitted:
                return  # the first round reads the prompt, too
            self._seconds[outcome.drafted].append(round.seconds)
            if shape is not None:
                self._levels.append(round.seconds.draft / shape.height)
                self._acceptance.learn(request, shape.accepted_ranks(outcome.path))

        with engine.override_parts(controller=Constant(size, shape=shape)), engine.observing(note):
            for number in range(len(self._prompts)):
                self._write(number, size)
        if not self._seconds[size]:
            raise ConfigError(
                f"no round after the first one of a text has drafted all {size} nodes of a tree, "
                "so that nothing was learned: give shorter prompts or more --max-tokens, or look "
                "for a smaller tree with --nodes and --levels."
            )

    def _write(self, number: int, size: int) -> None:
        """Writes the text of a prompt. It is broken off at its length: a request that could have no
        more tokens than that would be given smaller drafts long before it."""
        engine, ids = self._llm.engine, self._llm.prompt_ids(self._prompts[number])
        room = self._llm.max_model_len - len(ids)
        params = SamplingParams(
            temperature=self._temperature,
            seed=number,
            max_tokens=max(1, min(self._tokens + size, room)),
            ignore_eos=True,
        )
        (request,) = self._llm.requests(ids, params)
        engine.add(request)
        try:
            while not request.finished and len(request.output_ids) < self._tokens:
                engine.step()
        finally:
            engine.remove(request)
        if request.error is not None:
            raise request.error


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... and the last one.

    >>> _doubling(6)
    [1, 2, 4, 6]
    """
    return sorted({*(1 << power for power in range(most.bit_length()) if 1 << power < most), most})
