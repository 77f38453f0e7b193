"""The kinds of sampling options, by what they do to a text, and how each is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outpace.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from lab.options.reference import Case, Reference
    from outpace.llm import LLM

EXACT = 1e-12
SEEDS = 2
"""Rows per case and state."""
SEEDS_OF_ENDINGS = 6
"""The same for an option that ends texts, which two drawn texts may well never meet; and met at
different places of a block, it proves more."""


@dataclass(frozen=True)
class Ran:
    """A case, and what an engine made of it with the option and without."""

    reference: Reference
    llm: LLM
    case: Case
    on: Sequence[RequestOutput]
    off: Sequence[RequestOutput]


Check = Callable[[Ran], Iterator[str]]
"""Yields what is wrong with the texts of a case."""


def _dead_ends(ran: Ran) -> Iterator[str]:
    """A text ends with an error where its options leave no token, and nowhere else."""
    params = ran.reference.plain.resolve(ran.reference.params(ran.case, True, 0))
    options = ran.reference.plain.input_processor.row_options(params)
    for output in ran.on:
        prompt, tokens = output.prompt_token_ids, output.token_ids
        impossible = [
            not ran.reference.goes_on(prompt, tokens[:end], options)
            for end in range(len(tokens) + 1)
        ]
        if any(impossible[:-1]):
            yield "a text goes on where its options leave no token"
        if (output.finish_reason == "error") > impossible[-1]:
            yield "a text ends with an error where plain decoding goes on"
    if all(output.finish_reason != "error" for output in ran.on):
        yield "no text met a dead end: nothing is proved"


def _cut(
    ran: Ran, short: Sequence[RequestOutput], long: Sequence[RequestOutput], on: bool
) -> Iterator[str]:
    """Each text is the beginning of the one without the option, up to its end. Drafts end after
    a token that ends the text: a rule that looks ahead may then write another text, of which the
    contract says that it ends where it should."""
    ending = ran.reference.ending(ran.reference.params(ran.case, on, 0))
    strict = not ran.llm.engine.verifier.rule.looks_ahead
    for cut, whole in zip(short, long, strict=True):
        if strict and cut.token_ids != ending.cut(whole.token_ids):
            yield f"{cut.token_ids} is not where {whole.token_ids} should end"
    if all(one.token_ids == two.token_ids for one, two in zip(short, long, strict=True)):
        yield "no text was cut: nothing is proved"


def _same_tokens(ran: Ran) -> Iterator[str]:
    if [one.token_ids for one in ran.on] != [one.token_ids for one in ran.off]:
        yield "it changes the tokens, not only their text"
    if [one.text for one in ran.on] == [one.text for one in ran.off]:
        yield "it changes nothing: nothing is proved"


def _logprobs(ran: Ran) -> Iterator[str]:
    for output in ran.on:
        made: CompletionOutput = output.outputs[0]
        options = ran.reference.plain.input_processor.row_options(
            ran.reference.plain.resolve(ran.reference.params(ran.case, True, 0))
        )
        for place, entry in enumerate(made.logprobs or []):
            token = made.token_ids[place]
            if token >= ran.reference.plain.target.vocabulary:
                continue  # the contract has said so
            past = [made.token_ids[:place]]
            distribution = ran.reference.probs([output.prompt_token_ids], past, [options])[0]
            if abs(entry[token].logprob - float(distribution[token].log())) > 1e-9:
                right = float(distribution[token].log())
                yield f"reports {entry[token].logprob} for a log-probability of {right}"
        if len(made.logprobs or []) != len(made.token_ids):
            yield "reports not one entry per token"


def _seed(ran: Ran) -> Iterator[str]:
    # The same seed on three prompts, and again alone.
    for output in ran.on:
        seed = output.outputs[0].seed
        assert seed is not None  # since one was given
        params = ran.reference.params(ran.case, False, seed)
        again = ran.llm.generate([output.prompt_token_ids], params)[0]
        if again.token_ids != output.token_ids:
            yield "the same seed gives another text alone than in a batch"
    if all(one.token_ids == two.token_ids for one, two in zip(ran.on, ran.off, strict=True)):
        yield "another seed gives the same texts"


def _several(ran: Ran) -> Iterator[str]:
    for output in ran.on:
        if len({tuple(one.token_ids) for one in output.outputs}) == 1:
            yield "all n texts are the same"
        for one in output.outputs:
            params = replace(ran.reference.params(ran.case, False, 0), seed=one.seed)
            alone = ran.llm.generate([output.prompt_token_ids], params)[0]
            if alone.token_ids != one.token_ids:
                yield "one of n texts is not that of its seed alone"


def _drafting(ran: Ran) -> Iterator[str]:
    if "speculative" not in ran.case.values:
        return  # who drafts is no distribution, and all distributions are compared in every case
    limit = 0 if ran.case.values["speculative"] == "off" else int(ran.case.values["speculative"])
    for output in ran.on:
        if output.metrics.num_draft_tokens > limit * output.metrics.num_target_passes:
            yield f"drafts more than {limit} tokens per round"


def _nothing(ran: Ran) -> Iterator[str]:
    """What there is to look at is looked at in every case."""
    return iter(())


@dataclass(frozen=True)
class Kind:
    """Options that do the same to a text."""

    proof: str
    """The kind of proof, in words."""
    coupled_proof: str | None = None
    """The same under a coupled rule; None where it is no other."""
    check: Check = _nothing
    """What is looked at besides what is looked at in every case."""
    seeds: int = SEEDS
    """How many texts are drawn with the option, and how many without."""
    reaches_probs: bool = False
    """Whether it changes the distribution: its greedy texts, too, are then those of plain
    forwards."""
    changes_texts: bool = False
    """Whether a value that changes no text would prove nothing."""
    may_fail: bool = False
    """Whether a text may end with an error."""
    one_text: bool = True
    """Whether all texts of a case are those of the one seed that it was given, which the same loop
    of plain forwards writes under a coupled rule."""


PROBS = Kind(
    f"distribution at every node to {EXACT:g}",
    "text of plain forwards",
    reaches_probs=True,
    changes_texts=True,
)
DEAD_END = Kind(
    "an error where no distribution is left", check=_dead_ends, reaches_probs=True, may_fail=True
)
ENDS = Kind(
    "cut of the text without it",
    check=lambda ran: _cut(ran, ran.on, ran.off, True),
    seeds=SEEDS_OF_ENDINGS,
)
GOES_ON = Kind(
    "cut of the text without it",
    check=lambda ran: _cut(ran, ran.off, ran.on, False),
    seeds=SEEDS_OF_ENDINGS,
)
LENGTH = Kind("checked")
TEXT = Kind("checked", check=_same_tokens)
LOGPROBS = Kind("checked", check=_logprobs)
SEED = Kind("checked", check=_seed, one_text=False)
SEVERAL = Kind("checked", check=_several, one_text=False)
DRAFTING = Kind("checked", check=_drafting)
