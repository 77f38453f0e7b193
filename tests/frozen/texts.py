"""Texts: the token ids that each method, rule and kind of model writes, greedily and from seeds.

A greedy text is the target's, whatever is drafted; a seeded one follows from what is drafted for
it, which follows from its own history. Neither depends on times, and in float64 neither depends
on the processor. So that is what is frozen: the ids, and for seeded texts also how many tokens
were drafted and accepted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace import LLM, BeamSearchParams, SamplingParams
from outpace.errors import ConfigError

from .drafters import config_for, tokenizer
from .inside import bundled, lengths, methods, rules
from .models import CONTEXT, FAMILIES, model

USUAL = "usual"
"""The rule of a case that names none: the one that its method has by default."""
ON_BUNDLED = (
    *("none", "ngram", "suffix", "recycling", "lookahead", "draft_model", "draft_tree", "eagle3"),
    *("layer_skip", "auto", "staged", "ensemble", "hedge", "ucb"),
)
"""Methods that make sense for the bundled pair without anything that would have to be trained."""
OF_FAMILIES = ("none", "suffix", "draft_model", "draft_tree")
"""Methods that are tried on each kind of model."""
NEEDS_CLASSIFIER = ("judge", "stop_head")
"""A rule and a length policy that read a trained classifier."""
WITH_TOKENIZER = ("retrieval", "reflective")
"""A method whose datastore is compared with the target's tokenizer, and a rule with a text."""
RULE_OPTIONS: Mapping[str, Mapping[str, Any]] = {"reflective": {"prompt": "w3 w9 w4"}}

FIVE = ([5, 6, 7, 8, 9], [1], [2, 3] * 6, [11, 12, 13], [4, 7, 30, 4, 7])
"""Prompts of a batch: ragged, one token, repetitive."""
ONE = [9, 5, 9, 5, 20]
STORIES = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a red ball. Tom had a red ball. Tom had",
    "The",
    "One day, a big dog and a small cat went to the park. The dog",
    '"Can we play?" asked Sam. His mom said,',
)
STORY = "Sara likes to draw. She draws a sun and a tree."
LENGTHS = {"tiny": (16, 32), "bundled": (12, 24)}
"""Tokens of a text in a batch of five, and of one alone."""
GREEDY: Sequence[Mapping[str, Any]] = (
    {},
    {"repetition_penalty": 1.2},
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"bad_words_ids": [[7], [27]]},
)
SEEDED: Sequence[Mapping[str, Any]] = (
    {"temperature": 1.0, "seed": 11, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 12, "ignore_eos": True},
    {"temperature": 1.2, "top_k": 6, "min_p": 0.02, "seed": 13, "ignore_eos": True},
    {"temperature": 0.9, "typical_p": 0.95, "logit_bias": {7: 1.5}, "seed": 14, "min_tokens": 4},
    {"temperature": 1.0, "presence_penalty": 0.4, "stop_token_ids": [14, 16], "seed": 15},
)


@dataclass(frozen=True)
class Case:
    """What is drafted for which model, and how it is verified."""

    target: str
    """A family of `models`, or "bundled"."""
    method: str
    rule: str = USUAL
    tokens: str = "5"
    """``num_speculative_tokens``; "entropy:5" has a length policy, too."""

    @property
    def name(self) -> str:
        return f"{self.target}/{self.method}/{self.rule}/{self.tokens}"

    @classmethod
    def of(cls, name: str) -> Case:
        """Returns the case of a name."""
        return cls(*name.split("/"))

    @property
    def may_be_refused(self) -> bool:
        """Whether it names a rule or a length policy that does not go with every method."""
        return self.rule != USUAL or ":" in self.tokens

    def config(self, place: Path) -> dict[str, Any]:
        """Returns its ``speculative_config``. place: a folder for what has to be a file."""
        length, _, tokens = self.tokens.rpartition(":")
        found = config_for(self.target, self.method, place)
        found["num_speculative_tokens"] = "auto" if tokens == "auto" else int(tokens)
        if length:
            found["length"] = length
        if self.rule != USUAL:
            found["verify"] = {"name": self.rule, **RULE_OPTIONS.get(self.rule, {})}
        return found


def all_cases() -> Iterator[Case]:
    """Yields the cases for whatever methods, rules and length policies there are today."""
    drafting = list(methods())
    for method in drafting:
        yield Case("llama", method)
    for method in ("draft_model", "auto"):
        yield Case("llama", method, tokens="auto")
    for rule, about in rules().items():
        if about["lossless"]:
            yield from (Case("llama", method, rule) for method in drafting)
        elif rule not in NEEDS_CLASSIFIER:
            yield from (Case("llama", method, rule) for method in ("draft_model", "eagle"))
    for length in lengths():
        if length not in NEEDS_CLASSIFIER:
            yield from (
                Case("llama", method, tokens=f"{length}:5") for method in ("draft_model", "eagle")
            )
    for family in FAMILIES:
        if family != "llama":
            yield from (Case(family, method) for method in OF_FAMILIES)
    for method in ON_BUNDLED:
        yield Case("bundled", method)
        yield Case("bundled", method, tokens="auto")


def played(case: Case) -> dict[str, Any]:
    """Returns what a case writes: for each of its batches "texts", and for the seeded ones
    "counts". Where a rule or a length policy does not take what the method drafts: "refused", with
    the kind of the error."""
    with tempfile.TemporaryDirectory() as place:
        try:
            llm = _decoder(case, Path(place))
        except ConfigError as refusal:
            if not case.may_be_refused:
                raise
            return {"refused": type(refusal).__name__}
        texts: dict[str, list[str]] = {}
        counts: dict[str, list[str]] = {}
        for name, prompts, asked in _batches(case):
            outputs = llm.generate(prompts, asked)
            texts[name] = [_text(each) for one in outputs for each in one.outputs]
            if asked[0].temperature:
                counts[name] = [_counts(each.metrics) for one in outputs for each in one.outputs]
        if case.name == Case(case.target, "none").name:
            texts["beams"] = _beams(case, llm)
        return {"texts": texts, "counts": counts}


def _decoder(case: Case, place: Path) -> LLM:
    options: dict[str, Any] = {"speculative_config": case.config(place), "max_num_seqs": 5}
    if case.target == "bundled":
        options |= {"model": _bundled_target(), "tokenizer": _bundled_tokenizer()}
        return LLM(**options, max_model_len=256, generation_config="none")
    if case.method in WITH_TOKENIZER or case.rule in WITH_TOKENIZER:
        options["tokenizer"] = tokenizer()
    return LLM(model(case.target), **options, max_model_len=CONTEXT)


@cache
def _bundled_target() -> Any:
    """The bundled target, which is read once for all cases."""
    return AutoModelForCausalLM.from_pretrained(bundled("target"), dtype=torch.float64)


@cache
def _bundled_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled("target"))


def _batches(case: Case) -> Iterator[tuple[str, Sequence[Any], list[SamplingParams]]]:
    """Yields name, prompts and options of each batch."""
    big = case.target == "bundled"
    five, one = (STORIES, [STORY]) if big else (FIVE, [ONE])
    few, many = LENGTHS["bundled" if big else "tiny"]
    tag = {"tag": "copying"} if case.method == "tagged" else {}
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    asked: dict[str, Any] = {"temperature": 0.7, "seed": 16, "max_tokens": many, "ignore_eos": True}
    yield "greedy, five", five, [SamplingParams(**greedy, **x, max_tokens=few) for x in GREEDY]
    yield "seeded, five", five, [SamplingParams(**x, max_tokens=few) for x in SEEDED]
    yield "greedy, one", one, [SamplingParams(**greedy, **tag, max_tokens=many)]
    yield "seeded, one", one, [SamplingParams(**asked, **tag)]
    if case.method == "consensus":  # what it drafts from is other samples of a prompt
        yield "seeded, samples", one, [SamplingParams(**asked, n=5)]


def _beams(case: Case, llm: LLM) -> list[str]:
    """The best texts that a beam search finds, which decodes plainly."""
    big = case.target == "bundled"
    asked = BeamSearchParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True)
    found = llm.beam_search([STORY] if big else FIVE[:2], asked)
    return [" ".join(map(str, best.token_ids)) for each in found for best in each.sequences]


def _text(output: Any) -> str:
    """The ids of a text, and why it has ended where that was not its length."""
    ids = " ".join(map(str, output.token_ids))
    return ids if output.finish_reason == "length" else f"{ids} ({output.finish_reason})"


def _counts(metrics: Any) -> str:
    """How much of what was drafted for a text was accepted, in how many passes of the target."""
    drafted, accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens
    return f"{accepted} of {drafted} in {metrics.num_target_passes} passes"
