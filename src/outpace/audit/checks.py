"""The proofs behind the table of options: laws at every node, and texts against plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from outpace.api import LLM
from outpace.audit.contract import Ending
from outpace.audit.spy import Spy
from outpace.core.law import Branches, History, LawMaker, RowOptions
from outpace.core.params import SamplingParams
from outpace.core.rng import gumbel
from outpace.outputs import CompletionOutput, RequestOutput
from outpace.targets.hf.load import Loaded

Kind = Literal["law", "ends", "goes on", "length", "text", "logprobs", "seed", "n", "drafting"]
EXACT = 1e-12
PROMPTS = ((1, 2, 3, 4, 5), (6,), (7, 8, 7, 8, 7, 8), (2, 9, 4))
SEEDS = 2
"""Rows per case and state, so that stop conditions are met at different places of a block."""


@dataclass(frozen=True)
class Case:
    """An option with a value that changes the text. ``beside`` is on in the comparison too."""

    option: str
    values: Mapping[str, Any]
    kind: Kind
    beside: Mapping[str, Any] = field(default_factory=dict)


class Bench:
    """The target, the cases, and what a loop of plain forwards makes of them."""

    def __init__(self, target: Any, tokenizer: Any, cases: Sequence[Case], tokens: int) -> None:
        self.target = target
        self.cases = list(cases)
        self.tokens = tokens
        self.plain = LLM(target, tokenizer=tokenizer, generation_config="none")
        self._texts: dict[tuple[int, bool, int, bool], list[int]] = {}

    def params(self, case: Case, on: bool, seed: int, greedy: bool = False) -> SamplingParams:
        """Returns the params of a case with its option, or without."""
        base = {"temperature": 1.0, "max_tokens": self.tokens, "seed": seed}
        chosen = {**base, **case.beside, **(case.values if on else {})}
        if greedy:
            chosen["temperature"] = 0.0
        return SamplingParams(**chosen)

    def prompt(self, index: int) -> list[int]:
        """Returns the prompt of a case: ragged within a batch."""
        return list(PROMPTS[index % len(PROMPTS)])

    def ending(self, params: SamplingParams) -> Ending:
        """Returns where texts under these params end."""
        loaded: Loaded = self.plain.target
        resolved = self.plain.resolve(params)
        return Ending(resolved, loaded.eos_ids, loaded.vocabulary, loaded.tokenizer)

    def text(self, index: int, on: bool, seed: int, greedy: bool = False) -> list[int]:
        """Returns the coupled text of a case, or the greedy one, as a loop of plain forwards makes
        it that never heard of an engine."""
        key = (index, on, seed, greedy)
        if key not in self._texts:
            params = self.params(self.cases[index], on, seed, greedy)
            self._texts[key] = self._looped(self.prompt(index + seed), params)
        return self._texts[key]

    def without_effect(self) -> Iterator[str]:
        """Yields the options whose value changes no text, so that nothing would be proved."""
        for index, case in enumerate(self.cases):
            pairs = [(self.text(index, True, s), self.text(index, False, s)) for s in range(SEEDS)]
            if case.kind == "law" and all(on == off for on, off in pairs):
                yield case.option

    def _looped(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        resolved, ending = self.plain.resolve(params), self.ending(params)
        options = self.plain._row_options(resolved)
        tokens: list[int] = []
        while not tokens or not ending.ends(tokens):
            law = self.laws([list(prompt)], [tokens], [options])[0]
            place = torch.tensor(len(prompt) + len(tokens))
            noise = gumbel(torch.tensor(params.seed or 0), place, law.shape[-1])
            tokens.append(int((law.log() + noise).argmax()))
        return tokens

    @torch.inference_mode()
    def laws(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        options: Sequence[RowOptions],
    ) -> Tensor:
        """Returns ``[R, V]``: what plain decoding draws the next token of each text from."""
        texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        width = max(map(len, texts))
        padded = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        logits = self.target(input_ids=padded, use_cache=False).logits
        last = torch.tensor([len(text) - 1 for text in texts])
        chosen = logits[torch.arange(len(texts)), last][:, None]
        maker = LawMaker(options, self.plain.target.vocabulary)
        return maker(chosen, Branches.root(len(texts)), History(prompts, outputs))[:, 0]


class Trial:
    """One drafter and one rule, run on all cases."""

    def __init__(self, bench: Bench, llm: LLM) -> None:
        self.bench, self.llm = bench, llm
        self.nodes, self.worst, self.drafted, self.accepted = 0, 0.0, 0, 0
        self._spy = Spy()
        llm.engine.observers.append(self._spy)
        self._rule = llm.engine.verifier.rule

    def run(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns what failed, and the kind of proof, by option."""
        failures: dict[str, str] = {}
        proofs = {case.option: self._proof(case) for case in self.bench.cases}
        for index, groups in enumerate(self._generated()):
            case = self.bench.cases[index]
            for problem in self._problems(index, *groups):
                failures.setdefault(case.option, problem)
        for option, problem in self._wrong_laws():
            failures.setdefault(option, problem)
        if self._rule.lossless:
            for option, problem in self._wrong_greedy():
                failures.setdefault(option, problem)
        return failures, proofs

    def _proof(self, case: Case) -> str:
        if case.kind == "law":
            walked = self.llm.engine.verifier.coupled
            return "text of plain forwards" if walked else f"law at every node to {EXACT:g}"
        return "cut of the text without it" if case.kind in ("ends", "goes on") else "checked"

    # -- runs ----------------------------------------------------------------------------------

    def _generated(self) -> Iterator[tuple[list[RequestOutput], list[RequestOutput]]]:
        """Yields each case's outputs with the option and without; all come from one call."""
        cases = range(len(self.bench.cases))
        outputs = self._outputs(
            [(index, on, seed) for index in cases for on in (True, False) for seed in range(SEEDS)],
            greedy=False,
        )
        for start in range(0, len(outputs), 2 * SEEDS):
            yield outputs[start : start + SEEDS], outputs[start + SEEDS : start + 2 * SEEDS]

    def _outputs(self, runs: list[tuple[int, bool, int]], greedy: bool) -> list[RequestOutput]:
        """Returns the outputs of runs: the case's index, whether the option is on, the seed."""
        bench = self.bench
        prompts = [bench.prompt(index + seed) for index, _, seed in runs]
        params = [bench.params(bench.cases[index], on, seed, greedy) for index, on, seed in runs]
        outputs = self.llm.generate(prompts, params)
        for output in outputs:
            self.drafted += output.metrics.num_draft_tokens
            self.accepted += output.metrics.num_accepted_tokens
        return outputs

    def _wrong_laws(self) -> Iterator[tuple[str, str]]:
        """Yields the options of rows whose law at some node was not the plain one."""
        for seen in self._spy.rounds:
            plain = self.bench.laws(seen.prompts, seen.outputs, seen.options)
            away = _distance(seen.laws, plain)
            self.nodes += len(away)
            self.worst = max(self.worst, float(away.max()))
            for row in (away > EXACT).nonzero()[:, 0].tolist():
                yield (
                    self._option_of(seen.options[row].params),
                    f"the law after {seen.drafted[row]} drafted tokens is off by {away[row]:.2g}",
                )

    def _option_of(self, params: SamplingParams) -> str:
        for case in self.bench.cases:
            if all(getattr(params, name) == value for name, value in case.values.items()):
                return case.option
        return "temperature"

    def _wrong_greedy(self) -> Iterator[tuple[str, str]]:
        """Yields the options whose greedy text is not that of plain forwards."""
        laws = [index for index, case in enumerate(self.bench.cases) if case.kind == "law"]
        outputs = self._outputs([(i, True, seed) for i in laws for seed in range(SEEDS)], True)
        for place, index in enumerate(laws):
            own = outputs[place * SEEDS : (place + 1) * SEEDS]
            for problem in self._other_texts(index, own, greedy=True):
                yield self.bench.cases[index].option, problem

    # -- what may be wrong with the texts of one case --------------------------------------------

    def _problems(
        self, index: int, on: list[RequestOutput], off: list[RequestOutput]
    ) -> Iterator[str]:
        case = self.bench.cases[index]
        for output in on:
            params = self.bench.params(case, True, 0)
            for one in output.outputs:
                yield from self.bench.ending(params).breaches(one)
        if self.llm.engine.verifier.coupled and case.kind not in ("n", "seed"):
            yield from self._other_texts(index, on, greedy=False)
        check = {
            "ends": lambda: self._cut(case, on, off, True),
            "goes on": lambda: self._cut(case, off, on, False),
            "text": lambda: self._same_tokens(on, off),
            "logprobs": lambda: self._logprobs(case, on),
            "seed": lambda: self._seed(on, off),
            "n": lambda: self._several(case, on),
            "drafting": lambda: self._drafting(case, on),
        }.get(case.kind)
        if check is not None:
            yield from check()

    def _other_texts(self, index: int, outputs: list[RequestOutput], greedy: bool) -> Iterator[str]:
        for seed, output in enumerate(outputs):
            if self.bench.text(index, True, seed, greedy) != output.token_ids:
                yield f"the {'greedy' if greedy else 'coupled'} text is not that of plain forwards"

    def _cut(
        self, case: Case, short: list[RequestOutput], long: list[RequestOutput], on: bool
    ) -> Iterator[str]:
        ending = self.bench.ending(self.bench.params(case, on, 0))
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
            options = self.bench.plain._row_options(
                self.bench.plain.resolve(self.bench.params(case, True, 0))
            )
            for place, entry in enumerate(made.logprobs or []):
                token = made.token_ids[place]
                if token >= self.bench.plain.target.vocabulary:
                    continue  # the contract has said so
                past = [made.token_ids[:place]]
                law = self.bench.laws([output.prompt_token_ids], past, [options])[0]
                if abs(entry[token].logprob - float(law[token].log())) > 1e-9:
                    yield f"reports {entry[token].logprob} for a law of {float(law[token].log())}"
            if len(made.logprobs or []) != len(made.token_ids):
                yield "reports not one entry per token"

    def _seed(self, on: list[RequestOutput], off: list[RequestOutput]) -> Iterator[str]:
        # The same seed on three prompts, and again alone.
        for output in on:
            params = self.bench.params(Case("seed", {}, "seed"), False, output.outputs[0].seed)
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
                params = replace(self.bench.params(case, False, 0), seed=one.seed)
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
