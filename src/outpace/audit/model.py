"""Does this model, speculating as configured, still draw from the distribution that it draws from
plainly?

The distribution of plain decoding is no secret: one forward of a text gives p(. | prefix) at each
of its positions. So texts are sampled with speculation on, each under a seed of its own, and there
is a bet on every token, settled by the distribution that plain decoding would have drawn it from
(`sequential`). If every rule, mask, cache and stream is right, the token at position t of a text
follows p(. | what stands before it) whatever the engine did to find it, so that the bets are fair
and lose; first tokens, accepted ones, replacements and bonus tokens all pass through the same
positions.

What must not be done is to sort tokens by how they came about: of the tokens that were *accepted*,
few follow p, and under block verification not even those at a given depth do. Only the position in
the text is known beforehand.

A second test watches the drafter: each sampled node against the distribution that it is said to be
drawn from. Rules are exact for any drafter that tells the truth about q and for none that does not.
Each test has half of alpha, so that both together raise a false alarm in at most a share alpha of
clean runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from outpace.audit.bets import ClaimTest, PlainProbs, TextTest
from outpace.audit.diff import Report, drafted
from outpace.audit.noise import Noise, measure
from outpace.audit.plain import Ending
from outpace.audit.power import detectable
from outpace.audit.sequential import SequentialTest
from outpace.core.params import SamplingParams
from outpace.core.progress import silent
from outpace.errors import ConfigError, ParamsError
from outpace.llm import LLM
from outpace.outputs import CompletionOutput

CHUNK = 4
"""Texts that are asked for at once, in batches: rows then finish and are replaced at different
times."""


@dataclass(frozen=True)
class AuditPlan:
    """What to sample: ``samples`` texts of up to ``tokens`` tokens, shared out among the prompts.

    Raises ``ConfigError`` for values under which nothing would be tested.
    """

    prompts: Sequence[Sequence[int]]
    samples: int = 1000
    tokens: int | None = None
    """Unset: two rounds' worth, 2 (K + 1), so that what a full acceptance leaves behind is met."""
    alpha: float = 1e-3
    seed: int = 0
    power: bool = True
    """Whether to simulate what would have been caught: some seconds."""

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ConfigError("an audit needs prompts of one token or more: give at least one.")
        if any(isinstance(prompt, str) for prompt in self.prompts):
            raise ConfigError("an audit takes prompts as token ids: give llm.token_ids(text) each.")
        if self.samples < 1 or (self.tokens is not None and self.tokens < 1):
            raise ConfigError("an audit needs at least one text of one token: raise the number.")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha must be between 0 and 1, not {self.alpha}.")


@dataclass(frozen=True)
class Reading:
    """How one sequential test ended."""

    observations: int
    p_value: float
    alarm: bool
    alarmed_at: int | None
    leading: str

    @classmethod
    def of(cls, test: SequentialTest) -> Reading:
        """Returns the state of a test."""
        return cls(test.observations, test.p_value, test.alarm, test.alarmed_at, test.leading)


@dataclass(frozen=True)
class ModelReport:
    """What was found. ``ok`` is the verdict."""

    rule: str
    lossless: bool
    method: str
    samples: int
    tokens: int
    alpha: float
    text: Reading
    drafts: Reading
    noise: Noise
    detectable: dict[str, float | None]
    drafted: int
    """Tokens that were drafted in all texts."""
    accepted: int
    drafts_expected: bool
    """Whether there is a drafter, so that a text without any drafts tests nothing of it."""
    breaches: list[str] = field(default_factory=list)
    seconds: float = 0.0
    stopped_of: int | None = None
    """The texts that there were to be, where Ctrl-C came before all of them."""

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that were accepted."""
        return self.accepted / max(1, self.drafted)

    @property
    def ok(self) -> bool:
        """Whether something was tested, and nothing speaks against the engine."""
        quiet = not (self.text.alarm or self.drafts.alarm)
        tested = self.text.observations > 0 and (self.drafted > 0 or not self.drafts_expected)
        return tested and quiet and not self.breaches and not self.noise.excessive


def audit_model(
    llm: LLM,
    plan: AuditPlan,
    params: SamplingParams | None = None,
    report: Report = silent,
) -> ModelReport:
    """Returns the findings on an engine; stops early once the distribution is refuted, and at
    Ctrl-C.

    params: the sampling options to test under (not greedy: a greedy text has no distribution to
    test). report: is called with each step that is done, and with the number of all.
    ``KeyboardInterrupt`` where Ctrl-C comes before the first texts.
    """
    begin = perf_counter()
    params, tokens = _sampled(llm, plan, params or SamplingParams(temperature=1.0))
    noise = measure(llm.engine.target, plan.prompts, drafted(llm), tree=llm.engine.drafter.trees)
    session = _Session(llm, plan, params, noise)
    size = CHUNK * llm.engine.target.max_rows
    steps = -(-plan.samples // size)
    stopped = False
    try:
        with llm.engine.observing(session.claims):
            for turn, first in enumerate(range(0, plan.samples, size)):
                session.sample(range(first, min(plan.samples, first + size)), turn)
                report(f"{session.samples} texts", steps)
                if session.text.test.alarm:  # a lying drafter is worth the rest: is the text wrong?
                    break
    except KeyboardInterrupt:
        if not session.samples:
            raise
        stopped = True
    found = session.report(tokens, perf_counter() - begin)
    return replace(found, stopped_of=plan.samples) if stopped else found


def _sampled(llm: LLM, plan: AuditPlan, params: SamplingParams) -> tuple[SamplingParams, int]:
    """Returns the resolved params of one text, and its length."""
    tokens = plan.tokens or 2 * (drafted(llm) + 1)
    params = llm.resolve(replace(params, max_tokens=tokens, n=1))
    if params.greedy:
        raise ParamsError(
            "temperature 0 leaves nothing to sample: use `outpace audit diff`, or set temperature."
        )
    return params, tokens


class _Session:
    """The texts sampled so far and what they say."""

    def __init__(self, llm: LLM, plan: AuditPlan, params: SamplingParams, noise: Noise) -> None:
        self._llm, self._plan, self._params, self._noise = llm, plan, params, noise
        temperature = params.temperature or 1.0
        # As requests have them, with what the model's own generation_config adds.
        asked = [llm.requests(prompt, params)[0].options for prompt in plan.prompts]
        target, vocabulary = llm.engine.target, llm.target.vocabulary
        self._probs = [PlainProbs(target, options, vocabulary) for options in asked]
        self._endings = [
            self._ending(prompt, options.params)
            for prompt, options in zip(plan.prompts, asked, strict=True)
        ]
        self.text = TextTest(plan.alpha / 2, params.max_tokens or 1, noise.tolerance / temperature)
        own = llm.engine.drafter.loaded
        self.claims = ClaimTest(plan.alpha / 2, own.max_length if own is not None else None)
        self.samples = 0
        self._breaches: dict[str, int] = defaultdict(int)
        self._drafted = self._accepted = 0

    def sample(self, numbers: range, turn: int) -> None:
        """Samples the texts with these numbers and bets on their tokens, prompt by prompt.

        In every other turn all texts continue the same prompt: rows of one length read the end of
        their prompts in the pass of their first round, and others do not.
        """
        prompts = self._plan.prompts
        together = turn % 2 == 1
        which = [(turn // 2 if together else number) % len(prompts) for number in numbers]
        params = [replace(self._params, seed=self._plan.seed + number) for number in numbers]
        outputs = self._llm.generate([prompts[index] for index in which], params)
        texts: dict[int, list[list[int]]] = defaultdict(list)
        for index, output in zip(which, outputs, strict=True):
            self._look(index, output.outputs[0])
            texts[index].append(output.token_ids)
        for index, group in texts.items():
            rows = self._llm.engine.target.max_rows
            for begin in range(0, len(group), rows):
                part = group[begin : begin + rows]
                self.text.bet_on(index, prompts[index], part, self._probs[index])
        self.samples += len(numbers)

    def _ending(self, prompt: Sequence[int], params: SamplingParams) -> Ending:
        """What ends the texts of a prompt: the room that it leaves in the context, too."""
        llm = self._llm
        params = params.shortened(llm.max_model_len - len(prompt))
        ends = llm.input_processor.ends_of(prompt)
        return Ending(params, ends, llm.target.vocabulary, llm.tokenizer)

    def _look(self, index: int, output: CompletionOutput) -> None:
        for breach in self._endings[index].breaches(output):
            self._breaches[breach] += 1
        self._drafted += output.metrics.num_draft_tokens
        self._accepted += output.metrics.num_accepted_tokens

    def _detectable(self) -> dict[str, float | None]:
        test = self.text
        if not (self._plan.power and test.test.observations):
            return {}
        return detectable(test.design, test.test.alpha, test.stakes, test.slack)

    def report(self, tokens: int, seconds: float) -> ModelReport:
        """Returns what was found, with the power that the test had."""
        test, llm = self.text, self._llm
        return ModelReport(
            rule=llm.engine.verifier.rule.name,
            lossless=llm.engine.verifier.rule.lossless,
            method=llm.config.method,
            samples=self.samples,
            tokens=tokens,
            alpha=self._plan.alpha,
            text=Reading.of(test.test),
            drafts=Reading.of(self.claims.test),
            noise=self._noise,
            detectable=self._detectable(),
            drafted=self._drafted,
            accepted=self._accepted,
            drafts_expected=llm.engine.drafter.max_draft_tokens > 0,
            breaches=[
                *(f"{count} texts: {what}" for what, count in self._breaches.items()),
                *(f"{count} times: {what}" for what, count in self.claims.breaches.items()),
            ],
            seconds=seconds,
        )


def built_in_prompts(llm: LLM) -> list[list[int]]:
    """Returns prompts to test on when none are given: short texts, or tokens without a
    tokenizer."""
    tokenizer = llm.tokenizer
    found: list[list[int]] = []
    if tokenizer is not None:
        found = [list(tokenizer(text).input_ids) for text in _TEXTS]
    found = [ids for ids in found if ids]
    if len(found) > 1:
        return [*found, found[0][:2]]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(llm.target.vocabulary, (length,), generator=generator).tolist()
        for length in (5, 1, 9, 3, 2)
    ]


_TEXTS = (
    "Once upon a time there was a",
    "The",
    "one two three one two three one two three one two",
    "She opened the door and said:",
)
