"""Times of one engine's parts alone: a draft of k tokens, a pass that scores n tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from outpace.api import LLM
from outpace.bench.run.memory import synchronise
from outpace.bench.stats.theory import Times
from outpace.core.law import History, LawMaker, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.proposal import Verdict
from outpace.core.stats import Seconds
from outpace.core.trees.tree import Tree
from outpace.draft.base import Round, RowInfo, Rows
from outpace.targets.base import Plan, PromptInputs, Target


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
        target = self.llm.engine.target
        drafted = torch.full((self.batch, n - 1), 7, device=target.device)
        tree = Tree.chain(self.batch, n - 1, target.device)
        plan = Plan([[7]] * self.batch, drafted, tree)
        found = []
        try:
            _fill(target, self.batch, self.context)
            for _ in range(repeats + 1):
                found.append(self._timed(lambda: target.score(plan)))
        finally:
            target.retain([])
        return found[1:]  # the first one may have to make buffers

    @torch.inference_mode()
    def _drafting(self, k: int, repeats: int) -> list[float]:
        drafter = self.llm.engine.drafter
        prompts = [[(7 * i + row) % 200 for i in range(self.context)] for row in range(self.batch)]
        outputs: list[list[int]] = [[] for _ in prompts]
        rows = _Batch(self.llm, prompts, outputs, self.temperature)
        found = []
        drafter.admit([RowInfo(number, prompt) for number, prompt in enumerate(prompts)])
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
            verdict = Verdict(nothing, nothing)
            drafter.observe(rows, Round(proposal, verdict, Seconds(0.0, 0.0, 0.0)))

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
        return Rows(
            History(self.prompts, self.outputs),
            LawMaker([RowOptions(params)] * len(self.prompts), engine.vocabulary, device),
            torch.arange(len(self.prompts), device=device),
            engine.verifier.terms,
        )


def _fill(target: Target, rows: int, tokens: int) -> None:
    """Gives a target rows with so many cached tokens: one text, read once."""
    text = [(7 * place) % 200 for place in range(tokens)]
    target.admit(PromptInputs([*text, 7]))
    while not target.ready:
        target.fill(tokens)
    left = text[target.lengths[0] :]
    if left:
        nothing = torch.zeros(1, 0, dtype=torch.long, device=target.device)
        target.score(Plan([left], nothing, Tree.chain(1, 0, target.device)))
        target.commit([[]])
    for _ in range(rows - 1):
        target.fork(0)
