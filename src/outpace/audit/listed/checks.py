"""The proofs behind the table of options: laws at every node, and texts against plain ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from outpace.api import LLM
from outpace.audit.listed.reference import OF_TWO_TOKENS, RAGGED, SEEDS, Case, Prompts, Reference
from outpace.audit.spy import SeenLaws, Spy
from outpace.core.law import RowFault
from outpace.core.params import SamplingParams
from outpace.outputs import CompletionOutput, RequestOutput

EXACT = 1e-12


class Trial:
    """One drafter and one rule, run on all cases."""

    def __init__(self, reference: Reference, llm: LLM) -> None:
        self.reference, self.llm = reference, llm
        self.nodes, self.worst, self.drafted, self.accepted = 0, 0.0, 0, 0
        self._spy = Spy()
        llm.engine.observers.append(self._spy)
        self._rule = llm.engine.verifier.rule

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
        for option, problem in self._wrong_laws():
            failures.setdefault(option, problem)
        return failures, proofs

    def _proof(self, case: Case) -> str:
        if case.kind == "law":
            walked = self.llm.engine.verifier.coupled
            return "text of plain forwards" if walked else f"law at every node to {EXACT:g}"
        if case.kind == "dead end":
            return "an error where no law is left"
        return "cut of the text without it" if case.kind in ("ends", "goes on") else "checked"

    # -- runs ----------------------------------------------------------------------------------

    def _generated(self) -> Iterator[tuple[list[RequestOutput], list[RequestOutput]]]:
        """Yields each case's outputs with the option and without; all come from one call."""
        cases = self.reference.cases
        runs = [
            (index, on, seed)
            for index, case in enumerate(cases)
            for on in (True, False)
            for seed in range(case.seeds)
        ]
        outputs = iter(self._outputs(runs, greedy=False))
        for case in cases:
            yield (
                list(itertools.islice(outputs, case.seeds)),
                list(itertools.islice(outputs, case.seeds)),
            )

    def _outputs(
        self, runs: list[tuple[int, bool, int]], greedy: bool, prompts: Prompts = RAGGED
    ) -> list[RequestOutput]:
        """Returns the outputs of runs: the case's index, whether the option is on, the seed."""
        reference = self.reference
        asked = [list(prompts[(index + seed) % len(prompts)]) for index, _, seed in runs]
        params = [
            reference.params(reference.cases[index], on, seed, greedy) for index, on, seed in runs
        ]
        outputs = self.llm.generate(asked, params)
        for output in outputs:
            self.drafted += output.metrics.num_draft_tokens
            self.accepted += output.metrics.num_accepted_tokens
        return outputs

    def _wrong_laws(self) -> Iterator[tuple[str, str]]:
        """Yields the options of rows whose law at some node was not the plain one."""
        for seen in self._spy.rounds:
            yield from self._wrong_dead_ends(seen)
            try:
                plain = self.reference.laws(seen.prompts, seen.outputs, seen.options)
            except RowFault as fault:
                options = seen.options[fault.row]
                yield self._option_of(options.params), "a node has a law where there is none"
                continue
            away = _distance(seen.laws, plain)
            self.nodes += len(away)
            self.worst = max(self.worst, float(away.max()))
            for row in (away > EXACT).nonzero()[:, 0].tolist():
                yield (
                    self._option_of(seen.options[row].params),
                    f"the law after {seen.drafted[row]} drafted tokens is off by {away[row]:.2g}",
                )

    def _wrong_dead_ends(self, seen: SeenLaws) -> Iterator[tuple[str, str]]:
        """Yields the options of nodes that are said to have no law, and have one."""
        for node in seen.dead_ends:
            if self.reference.goes_on(node.prompt, node.output, node.options):
                yield self._option_of(node.options.params), "a node has no law where there is one"

    def _option_of(self, params: SamplingParams) -> str:
        for case in self.reference.cases:
            if all(getattr(params, name) == value for name, value in case.values.items()):
                return case.option
        return "temperature"

    def _wrong_texts(self, prompts: Prompts, greedy: bool) -> Iterator[tuple[str, str]]:
        """Yields the options whose greedy text, or coupled one, is not that of plain forwards.

        Rules that draw are run, too: their laws are looked at later.
        """
        cases = enumerate(self.reference.cases)
        changing = [index for index, case in cases if case.kind in ("law", "dead end")]
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
                if case.kind != "dead end" or one.finish_reason != "error":
                    yield from self.reference.ending(params).breaches(one)
        if self.llm.engine.verifier.coupled and case.kind not in ("n", "seed"):
            for seed, output in enumerate(on):
                yield from self._other_text(index, seed, output, greedy=False)
        check = {
            "ends": lambda: self._cut(case, on, off, True),
            "goes on": lambda: self._cut(case, off, on, False),
            "text": lambda: self._same_tokens(on, off),
            "logprobs": lambda: self._logprobs(case, on),
            "seed": lambda: self._seed(on, off),
            "n": lambda: self._several(case, on),
            "drafting": lambda: self._drafting(case, on),
            "dead end": lambda: self._dead_ends(case, on),
        }.get(case.kind)
        if check is not None:
            yield from check()

    def _other_text(
        self, index: int, seed: int, output: RequestOutput, greedy: bool
    ) -> Iterator[str]:
        plain = self.reference.text(index, True, output.prompt_token_ids, seed, greedy)
        if plain != output.token_ids:
            yield f"the {'greedy' if greedy else 'coupled'} text is not that of plain forwards"

    def _dead_ends(self, case: Case, on: list[RequestOutput]) -> Iterator[str]:
        """A text ends with an error where its options leave no token, and nowhere else."""
        params = self.reference.plain.resolve(self.reference.params(case, True, 0))
        options = self.reference.plain.intake.row_options(params)
        for output in on:
            prompt, tokens = output.prompt_token_ids, output.token_ids
            lawless = [
                not self.reference.goes_on(prompt, tokens[:end], options)
                for end in range(len(tokens) + 1)
            ]
            if any(lawless[:-1]):
                yield "a text goes on where its options leave no token"
            if (output.finish_reason == "error") > lawless[-1]:
                yield "a text ends with an error where plain decoding goes on"
        if all(output.finish_reason != "error" for output in on):
            yield "no text met a dead end: nothing is proved"

    def _cut(
        self, case: Case, short: list[RequestOutput], long: list[RequestOutput], on: bool
    ) -> Iterator[str]:
        ending = self.reference.ending(self.reference.params(case, on, 0))
        for cut, whole in zip(short, long, strict=True):
            if cut.token_ids != ending.cut(whole.token_ids):
                yield f"{cut.token_ids} is not where {whole.token_ids} should end"
        if all(one.token_ids == two.token_ids for one, two in zip(short, long, strict=True)):
            yield "no text was cut: nothing is proved"

    def _same_tokens(self, on: list[RequestOutput], off: list[RequestOutput]) -> Iterator[str]:
        if [one.token_ids for one in on] != [one.token_ids for one in off]:
            yield "it changes the tokens, not only their text"
        if [one.text for one in on] == [one.text for one in off]:
            yield "it changes nothing: nothing is proved"

    def _logprobs(self, case: Case, on: list[RequestOutput]) -> Iterator[str]:
        for output in on:
            made: CompletionOutput = output.outputs[0]
            options = self.reference.plain.intake.row_options(
                self.reference.plain.resolve(self.reference.params(case, True, 0))
            )
            for place, entry in enumerate(made.logprobs or []):
                token = made.token_ids[place]
                if token >= self.reference.plain.target.vocabulary:
                    continue  # the contract has said so
                past = [made.token_ids[:place]]
                law = self.reference.laws([output.prompt_token_ids], past, [options])[0]
                if abs(entry[token].logprob - float(law[token].log())) > 1e-9:
                    yield f"reports {entry[token].logprob} for a law of {float(law[token].log())}"
            if len(made.logprobs or []) != len(made.token_ids):
                yield "reports not one entry per token"

    def _seed(self, on: list[RequestOutput], off: list[RequestOutput]) -> Iterator[str]:
        # The same seed on three prompts, and again alone.
        for output in on:
            seed = output.outputs[0].seed
            assert seed is not None  # since one was given
            params = self.reference.params(Case("seed", {}, "seed"), False, seed)
            again = self.llm.generate([output.prompt_token_ids], params)[0]
            if again.token_ids != output.token_ids:
                yield "the same seed gives another text alone than in a batch"
        if all(one.token_ids == two.token_ids for one, two in zip(on, off, strict=True)):
            yield "another seed gives the same texts"

    def _several(self, case: Case, on: list[RequestOutput]) -> Iterator[str]:
        for output in on:
            if len({tuple(one.token_ids) for one in output.outputs}) == 1:
                yield "all n texts are the same"
            for one in output.outputs:
                params = replace(self.reference.params(case, False, 0), seed=one.seed)
                alone = self.llm.generate([output.prompt_token_ids], params)[0]
                if alone.token_ids != one.token_ids:
                    yield "one of n texts is not that of its seed alone"

    def _drafting(self, case: Case, on: list[RequestOutput]) -> Iterator[str]:
        if "speculative" not in case.values:
            return  # who drafts is no law, and all laws are compared in every case
        limit = 0 if case.values["speculative"] == "off" else int(case.values["speculative"])
        for output in on:
            if output.metrics.num_draft_tokens > limit * output.metrics.num_target_passes:
                yield f"drafts more than {limit} tokens per round"


def _distance(laws: Tensor, plain: Tensor) -> Tensor:
    """``[R]``: the greatest difference of two probabilities; a token that one law lacks has 0."""
    beyond = laws.shape[-1] - plain.shape[-1]
    return (laws - torch.nn.functional.pad(plain, (0, beyond))).abs().amax(-1)
