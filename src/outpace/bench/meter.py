"""Times of one engine's parts alone: a draft of k tokens, a pass that scores n tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from outpace.api import LLM
from outpace.bench.memory import synchronise
from outpace.bench.theory import Times
from outpace.core.law import History, LawMaker, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Verdict
from outpace.core.tree import Tree
from outpace.draft.base import Rows


@dataclass
class Meter:
    """Collects samples for one engine, batch size, context and temperature.

    Samples can be taken at several moments of a run, so that they see the same machine as it did;
    the median counts.
    """

    llm: LLM
    batch: int
    context: int
    temperature: float = 0.0
    clock: Callable[[], float] = perf_counter
    _draft: dict[int, list[float]] = field(default_factory=dict)
    _verify: dict[int, list[float]] = field(default_factory=dict)

    def sample(
        self, drafts: Iterable[int] = (), scored: Iterable[int] = (1,), repeats: int = 3
    ) -> None:
        """Takes ``repeats`` samples of each draft length and each number of scored tokens."""
        for n in sorted(set(scored)):
            self._verify.setdefault(n, []).extend(self._verifying(n, repeats))
        for k in sorted(set(drafts) - {0}):
            self._draft.setdefault(k, []).extend(self._drafting(k, repeats))

    @property
    def times(self) -> Times:
        """The medians so far."""
        return Times(
            draft={k: median(found) for k, found in self._draft.items()},
            verify={n: median(found) for n, found in self._verify.items()},
        )

    @torch.inference_mode()
    def _verifying(self, n: int, repeats: int) -> list[float]:
        runner = self.llm.engine.target
        tokens = torch.full((self.batch, n), 7, device=runner.device)
        tree = Tree.chain(self.batch, n - 1, runner.device)
        found = []
        runner.admit(self.batch)
        # What the cached keys are does not change what a pass costs; how many there are does.
        runner.lengths = [self.context] * self.batch
        try:
            for _ in range(repeats + 1):
                found.append(self._timed(lambda: runner.forward(tokens, keep=n, tree=tree)))
        finally:
            runner.retain([])
        return found[1:]  # the first one may have to make buffers

    @torch.inference_mode()
    def _drafting(self, k: int, repeats: int) -> list[float]:
        drafter = self.llm.engine.drafter
        prompts = [[(7 * i + row) % 200 for i in range(self.context)] for row in range(self.batch)]
        outputs: list[list[int]] = [[] for _ in prompts]
        rows = _Batch(self.llm, prompts, outputs, self.temperature)
        found = []
        drafter.admit(prompts)
        try:
            for step in range(repeats + 1):
                now = rows.now()
                found.append(self._timed(lambda now=now: self._round(now, k)))  # type: ignore[misc]
                for output in outputs:  # a draft is only made once more text is committed
                    output.append(step % 200)
        finally:
            drafter.retain([])
        return found[1:]

    def _round(self, rows: Rows, k: int) -> None:
        drafter = self.llm.engine.drafter
        proposal = drafter.propose(rows, [k] * self.batch)
        if proposal.tree.size:
            nothing = torch.zeros_like(rows.positions)
            drafter.observe(rows, proposal, Verdict(nothing, nothing))

    def _timed(self, work: Callable[[], object]) -> float:
        device = self.llm.engine.target.device
        synchronise(device)
        begin = self.clock()
        work()
        synchronise(device)
        return self.clock() - begin


@dataclass(frozen=True)
class _Batch:
    """A batch in the making, as a drafter sees it."""

    llm: LLM
    prompts: Sequence[list[int]]
    outputs: Sequence[list[int]]
    temperature: float

    def now(self) -> Rows:
        engine = self.llm.engine
        params = SamplingParams(temperature=self.temperature).resolve({})
        device = engine.target.device
        lengths = [len(p) + len(o) for p, o in zip(self.prompts, self.outputs, strict=True)]
        return Rows(
            History(self.prompts, self.outputs),
            LawMaker([RowOptions(params)] * len(self.prompts), engine.vocabulary, device),
            torch.arange(len(self.prompts), device=device),
            torch.tensor(lengths, device=device),
            engine.verifier.brief,
        )
