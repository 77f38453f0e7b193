"""What plain decoding makes of each case of an option: distributions and texts, without any
engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.options.kinds import SEEDS, Kind
from outpace.audit.plain import Ending
from outpace.core.gumbel import gumbel
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowFault, RowOptions
from outpace.core.params import SamplingParams
from outpace.llm import LLM

Prompts = Sequence[Sequence[int]]
RAGGED: Prompts = ((1, 2, 3, 4, 5), (6,), (7, 8, 7, 8, 7, 8), (2, 9, 4))
OF_TWO_TOKENS: Prompts = ((1, 2), (6, 7), (2, 9), (8, 8))
"""Where all prompts of a call have two tokens, two are pending when the first draft is scored."""


@dataclass(frozen=True)
class Case:
    """An option with a value that changes the text. ``beside`` is on in the comparison too."""

    option: str
    values: Mapping[str, Any]
    kind: Kind
    beside: Mapping[str, Any] = field(default_factory=dict)


class Reference:
    """The target, the cases, and what a loop of plain forwards makes of them."""

    def __init__(self, target: Any, tokenizer: Any, cases: Sequence[Case], tokens: int) -> None:
        self.cases = list(cases)
        self.tokens = tokens
        self.plain = LLM(
            target,
            tokenizer=tokenizer,
            speculative_config={"method": "none"},
            generation_config="none",
        )
        self._texts: dict[tuple[int, bool, tuple[int, ...], int, bool], list[int]] = {}
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def params(self, case: Case, on: bool, seed: int, greedy: bool = False) -> SamplingParams:
        """Returns the params of a case with its option, or without."""
        base = {"temperature": 1.0, "max_tokens": self.tokens, "seed": seed}
        chosen = {**base, **case.beside, **(case.values if on else {})}
        if greedy:
            chosen["temperature"] = 0.0
        return SamplingParams(**chosen)

    def ending(self, params: SamplingParams) -> Ending:
        """Returns where texts under these params end."""
        loaded = self.plain.target
        resolved = self.plain.resolve(params)
        return Ending(resolved, loaded.eos_ids, loaded.vocabulary, loaded.tokenizer)

    def text(
        self, index: int, on: bool, prompt: Sequence[int], seed: int, greedy: bool = False
    ) -> list[int]:
        """Returns the coupled text of a case, or the greedy one, as a loop of plain forwards makes
        it that never heard of an engine. It ends early where the options leave no token."""
        key = (index, on, tuple(prompt), seed, greedy)
        if key not in self._texts:
            params = self.params(self.cases[index], on, seed, greedy)
            self._texts[key] = self._looped(prompt, params)
        return self._texts[key]

    def without_effect(self) -> Iterator[str]:
        """Yields the options whose value changes no text, so that nothing would be proved."""
        for index, case in enumerate(self.cases):
            prompts = [RAGGED[(index + seed) % len(RAGGED)] for seed in range(SEEDS)]
            pairs = [
                (self.text(index, True, prompt, seed), self.text(index, False, prompt, seed))
                for seed, prompt in enumerate(prompts)
            ]
            if case.kind.changes_texts and all(on == off for on, off in pairs):
                yield case.option

    def _looped(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        resolved, ending = self.plain.resolve(params), self.ending(params)
        options = self.plain.input_processor.row_options(resolved)
        tokens: list[int] = []
        while self.goes_on(prompt, tokens, options) and not (tokens and ending.ends(tokens)):
            distribution = self.probs([list(prompt)], [tokens], [options])[0]
            place = torch.tensor(len(prompt) + len(tokens))
            noise = gumbel(torch.tensor(params.seed or 0), place, distribution.shape[-1])
            tokens.append(int((distribution.log() + noise).argmax()))
        return tokens

    def probs(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        options: Sequence[RowOptions],
    ) -> Tensor:
        """Returns ``[R, V]``: what plain decoding draws the next token of each text from."""
        texts = [(*prompt, *output) for prompt, output in zip(prompts, outputs, strict=True)]
        for text in sorted(texts, key=len, reverse=True):
            self._read(text)
        logits = torch.stack([self._logits[text] for text in texts])[:, None]
        pipeline = LogitsPipeline(options, self.plain.target.vocabulary)
        return pipeline(logits, Branches.root(len(texts)), History(prompts, outputs))[:, 0]

    def goes_on(self, prompt: Sequence[int], output: Sequence[int], options: RowOptions) -> bool:
        """Returns whether the options leave any token to go on with after this text."""
        try:
            self.probs([prompt], [output], [options])
        except RowFault:
            return False
        return True

    def _read(self, text: tuple[int, ...]) -> None:
        """Keeps the logits after each token of a text, from one plain forward of all of it."""
        if text not in self._logits:
            for end, logits in enumerate(self.plain.engine.target.forward_uncached(text), 1):
                self._logits.setdefault(text[:end], logits)
