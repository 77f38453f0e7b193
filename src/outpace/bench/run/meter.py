"""Times of one engine's parts alone: a draft of k tokens, a pass that scores n tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch

from outpace.bench.run.rehearsal import fill, rehearsing, text_of
from outpace.bench.stats.theory import Times
from outpace.core.transfer import synchronise
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.llm import LLM
from outpace.targets.base import Plan
from outpace.targets.hf.kinds import is_encoder_decoder

Result = TypeVar("Result")


def has_parts(llm: LLM) -> bool:
    """Returns whether the parts of an engine's rounds can be timed alone: those of an
    encoder-decoder cannot, whose texts need a source."""
    return not is_encoder_decoder(llm.target.model)


@dataclass
class Meter:
    """Collects samples for one engine, batch size, context and temperature.

    Samples can be taken at several moments of a run, so that they see the same machine as it did;
    the median counts. Only of an engine that `has_parts`; ``ConfigError`` for another one.
    """

    llm: LLM
    batch: int
    context: int
    temperature: float = 0.0
    clock: Callable[[], float] = perf_counter
    _draft: dict[int, list[float]] = field(default_factory=dict)
    _verify: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not has_parts(self.llm):
            raise ConfigError(
                f"{self.llm.target.name} is an encoder-decoder, whose rounds' parts cannot be "
                "timed alone: compare whole texts, with outpace bench run."
            )

    def sample(
        self, drafts: Iterable[int] = (), scored: Iterable[int] = (1,), repeats: int = 3
    ) -> None:
        """Takes ``repeats`` samples of each draft length and each number of scored tokens.

        A sample of a draft counts for the nodes that were drafted, which may be fewer than asked
        for: some drafters have a longest draft, and a look-up may find less.
        """
        for n, seconds in self._verifying(sorted(set(scored)), repeats):
            self._verify.setdefault(n, []).append(seconds)
        for k in sorted(set(drafts) - {0}):
            for nodes, seconds in self._drafting(k, repeats):
                if nodes:
                    self._draft.setdefault(nodes, []).append(seconds)

    @property
    def times(self) -> Times:
        """The medians so far."""
        return Times(
            draft={k: median(found) for k, found in self._draft.items()},
            verify={n: median(found) for n, found in self._verify.items()},
        )

    @torch.inference_mode()
    def _verifying(self, scored: Sequence[int], repeats: int) -> list[tuple[int, float]]:
        """Returns how many tokens were scored and the seconds, for each number and repeat. The
        context is read once for all of them, since nothing that is scored is committed."""
        if not scored:
            return []
        target = self.llm.engine.target
        text = text_of(self.context + 1, self.llm.engine.vocabulary)
        found = []
        try:
            with target.computing():
                fill(target, self.batch, text)
                for n in scored:
                    score = partial(target.score, self._plan(text[-1], n))
                    # the first one may have to make buffers
                    taken = [self._timed(score)[0] for _ in range(repeats + 1)][1:]
                    found += [(n, seconds) for seconds in taken]
        finally:
            target.retain([])
        return found

    def _plan(self, root: int, n: int) -> Plan:
        """A pass over the root and a draft, n tokens in all."""
        device = self.llm.engine.target.device
        drafted = torch.full((self.batch, n - 1), root, device=device)
        return Plan([[root]] * self.batch, drafted, Tree.chain(self.batch, n - 1, device))

    @torch.inference_mode()
    def _drafting(self, k: int, repeats: int) -> list[tuple[int, float]]:
        """Returns how many nodes rounds that may draft k have drafted, and the drafter's seconds:
        for the draft, and for what it does once it is told what became of it."""
        found = []
        computing = self.llm.engine.target.computing()
        text = rehearsing(self.llm, self.batch, self.context, self.temperature)
        with computing, text as rehearsal:
            for _ in range(repeats + 1):
                rows = rehearsal.rows()
                drafting, proposal = self._timed(partial(rehearsal.propose, rows, k))
                telling, _ = self._timed(rehearsal.score(rows, proposal))
                found.append((int(proposal.counts.max()), drafting + telling))
        return found[1:]

    def _timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        device = self.llm.engine.target.device
        synchronise(device)
        begin = self.clock()
        result = work()
        synchronise(device)
        return self.clock() - begin, result
