"""The proofs behind the table of options: distributions at every node, and texts against plain
ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.options.kinds import EXACT, SEEDS, Ran
from lab.options.reference import OF_TWO_TOKENS, RAGGED, Case, Prompts, Reference
from outpace.core.logits_pipeline import RowFault, RowOptions
from outpace.core.params import SamplingParams
from outpace.draft.base import Round
from outpace.errors import ParamsError
from outpace.llm import LLM
from outpace.outputs import RequestOutput


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

    def __call__(self, trace: Round) -> None:
        probs, proposal = trace.verdict.p, trace.proposal
        if probs is None:
            return
        branches = proposal.branches
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
                torch.stack([probs[row, node] for row, node, _ in possible]).clone(),
                [list(prompts[row]) for row, _, _ in possible],
                [[*committed[row], *path] for row, _, path in possible],
                [len(path) for _, _, path in possible],
                [trace.requests[row].options for row, _, _ in possible],
                dead_ends,
            )
        )


# -- one drafter and one rule ------------------------------------------------------------------


class Trial:
    """One drafter and one rule, run on all cases."""

    def __init__(self, reference: Reference, llm: LLM) -> None:
        self.reference, self.llm = reference, llm
        self.nodes, self.worst, self.drafted, self.accepted = 0, 0.0, 0, 0
        self._spy = Spy()
        llm.engine.observers.append(self._spy)
        self._rule = llm.engine.verifier.rule

    def refuses(self, index: int) -> bool:
        """Returns whether a case's option is refused as a whole here: a predicted text, where no
        look-up would look into it."""
        option = self.reference.cases[index].option
        return option == "prediction" and not self.llm.input_processor.takes_predictions

    def refused(self) -> dict[str, str]:
        """Returns the sentences of the options that are refused as a whole."""
        said = {}
        for index, case in enumerate(self.reference.cases):
            if self.refuses(index):
                try:
                    self.llm.requests(list(RAGGED[0]), self.reference.params(case, True, 0))
                except ParamsError as error:
                    said[case.option] = str(error)
        return said

    def run(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns what failed, and the kind of proof, by option."""
        failures: dict[str, str] = {}
        proofs = {case.option: self._proof(case) for case in self.reference.cases}
        for index, groups in enumerate(self._generated()):
            case = self.reference.cases[index]
            for problem in self._problems(index, *groups):
                failures.setdefault(case.option, problem)
        for prompts, greedy in itertools.product((RAGGED, OF_TWO_TOKENS), (True, False)):
            for option, problem in self._wrong_texts(prompts, greedy):
                failures.setdefault(option, problem)
        for option, problem in self._wrong_probs():
            failures.setdefault(option, problem)
        return failures, proofs

    def _proof(self, case: Case) -> str:
        coupled = self.llm.engine.verifier.coupled
        return (coupled and case.kind.coupled_proof) or case.kind.proof

    # -- runs ----------------------------------------------------------------------------------

    def _generated(self) -> Iterator[tuple[list[RequestOutput], list[RequestOutput]]]:
        """Yields each case's outputs with the option and without; all come from one call."""
        cases = self.reference.cases
        runs = [
            (index, on, seed)
            for index, case in enumerate(cases)
            for on in (True, False)
            for seed in range(case.kind.seeds)
        ]
        outputs = iter(self._outputs(runs, greedy=False))
        for case in cases:
            yield (
                list(itertools.islice(outputs, case.kind.seeds)),
                list(itertools.islice(outputs, case.kind.seeds)),
            )

    def _outputs(
        self, runs: list[tuple[int, bool, int]], greedy: bool, prompts: Prompts = RAGGED
    ) -> list[RequestOutput]:
        """Returns the outputs of runs: the case's index, whether the option is on, the seed."""
        reference = self.reference
        asked = [list(prompts[(index + seed) % len(prompts)]) for index, _, seed in runs]
        params = [
            reference.params(reference.cases[index], on and not self.refuses(index), seed, greedy)
            for index, on, seed in runs
        ]
        outputs = self.llm.generate(asked, params)
        for output in outputs:
            self.drafted += output.metrics.num_draft_tokens
            self.accepted += output.metrics.num_accepted_tokens
        return outputs

    def _wrong_probs(self) -> Iterator[tuple[str, str]]:
        """Yields the options of rows whose distribution at some node was not the plain one."""
        for seen in self._spy.rounds:
            yield from self._wrong_dead_ends(seen)
            try:
                plain = self.reference.probs(seen.prompts, seen.outputs, seen.options)
            except RowFault as fault:
                options = seen.options[fault.row]
                yield (
                    self._option_of(options.params),
                    "a node has a distribution where there is none",
                )
                continue
            away = _distance(seen.probs, plain)
            self.nodes += len(away)
            self.worst = max(self.worst, float(away.max()))
            for row in (away > EXACT).nonzero()[:, 0].tolist():
                yield (
                    self._option_of(seen.options[row].params),
                    f"the distribution after {seen.drafted[row]} drafted tokens is off by "
                    f"{away[row]:.2g}",
                )

    def _wrong_dead_ends(self, seen: SeenProbs) -> Iterator[tuple[str, str]]:
        """Yields the options of nodes that are said to have no distribution, and have one."""
        for node in seen.dead_ends:
            if self.reference.goes_on(node.prompt, node.output, node.options):
                yield (
                    self._option_of(node.options.params),
                    "a node has no distribution where there is one",
                )

    def _option_of(self, params: SamplingParams) -> str:
        for case in self.reference.cases:
            if all(getattr(params, name) == value for name, value in case.values.items()):
                return case.option
        return "temperature"

    def _wrong_texts(self, prompts: Prompts, greedy: bool) -> Iterator[tuple[str, str]]:
        """Yields the options whose greedy text, or coupled one, is not that of plain forwards.

        Rules that draw are run, too: their distributions are looked at later.
        """
        cases = enumerate(self.reference.cases)
        changing = [index for index, case in cases if case.kind.reaches_probs]
        runs = [(index, True, seed) for index in changing for seed in range(SEEDS)]
        outputs = self._outputs(runs, greedy, prompts)
        if not (self._rule.lossless if greedy else self.llm.engine.verifier.coupled):
            return
        for (index, _, seed), output in zip(runs, outputs, strict=True):
            for problem in self._other_text(index, seed, output, greedy):
                yield self.reference.cases[index].option, problem

    # -- what may be wrong with the texts of one case --------------------------------------------

    def _problems(
        self, index: int, on: list[RequestOutput], off: list[RequestOutput]
    ) -> Iterator[str]:
        case = self.reference.cases[index]
        for output in on:
            params = self.reference.params(case, True, 0)
            for one in output.outputs:
                if not case.kind.may_fail or one.finish_reason != "error":
                    yield from self.reference.ending(params).breaches(one)
        if self.llm.engine.verifier.coupled and case.kind.one_text:
            for seed, output in enumerate(on):
                yield from self._other_text(index, seed, output, greedy=False)
        yield from case.kind.check(Ran(self.reference, self.llm, case, on, off))

    def _other_text(
        self, index: int, seed: int, output: RequestOutput, greedy: bool
    ) -> Iterator[str]:
        plain = self.reference.text(index, True, output.prompt_token_ids, seed, greedy)
        if plain != output.token_ids:
            yield f"the {'greedy' if greedy else 'coupled'} text is not that of plain forwards"


def _distance(probs: Tensor, plain: Tensor) -> Tensor:
    """``[R]``: the greatest difference of two probabilities; a token that one distribution lacks
    has 0."""
    beyond = probs.shape[-1] - plain.shape[-1]
    return (probs - torch.nn.functional.pad(plain, (0, beyond))).abs().amax(-1)
