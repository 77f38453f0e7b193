"""Texts with and without speculation, token by token, and what each difference comes from.

Greedy decoding and coupled sampling give one text, whatever is drafted, up to rounding: a pass
over k + 1 tokens may add numbers up in another order than a pass over one, and where two tokens
are almost equally good that decides. So at the first difference of two texts both rows of logits
are computed again, read plainly and scored as drafted, and the gap between the two tokens is
measured in what was compared when they were chosen (logits after all options; for the coupled rule
log p plus noise). Below a stated tolerance the two texts are equally right; above it there is a
bug.

That both texts are wrong in the same way is ruled out by `forced`: each text without speculation is
checked against one plain forward of itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from torch import Tensor

from outpace.audit.noise import Noise, measure, score_as_drafted
from outpace.audit.plain import Choice, Deviation, Ending, deviations
from outpace.core.params import SamplingParams
from outpace.core.progress import silent
from outpace.errors import ConfigError
from outpace.llm import LLM
from outpace.outputs import CompletionOutput

Mode = Literal["greedy", "coupled"]
Report = Callable[[str, int], None]
"""Is called with each step that is done, and with the number of all."""

SHORT = 2
"""The first tokens of each prompt, n of them, are a prompt too. It is the shortest one that
leaves more than one token pending when the first draft is scored."""


AT_ONCE = 2
"""Prompts that are given in one call, for each row: some join the batch while others write."""


@dataclass(frozen=True)
class Difference:
    """Where two texts part for the first time, and why."""

    mode: Mode
    prompt: int
    position: int
    plain: int | None
    """The token without speculation; None where that text had ended."""
    speculative: int | None
    gap: float
    """By how much the plain token is better than the other, read plainly."""
    tolerance: float
    scoring: float
    """Greatest difference between the two rows of logits."""
    plain_text: str = ""
    speculative_text: str = ""
    lossy: bool = False
    """Whether the rule is meant to change texts."""

    @property
    def bug(self) -> bool:
        """Whether rounding cannot explain it. With a lossy rule it need not be ours."""
        return not self.gap <= self.tolerance

    @property
    def verdict(self) -> str:
        """The finding in words."""
        if not self.bug:
            return f"near-tie (gap {self.gap:.2g} below tolerance {self.tolerance:.2g})"
        if self.scoring > self.tolerance:
            return f"BUG: drafted tokens are scored differently, by {self.scoring:.2g}"
        blame = "lossy rule" if self.lossy else "BUG"
        if None in (self.plain, self.speculative):
            return f"{blame}: one text goes on where the other ends"
        return f"{blame}: gap {self.gap:.2g} above tolerance {self.tolerance:.2g}"


@dataclass(frozen=True)
class DiffReport:
    """What was compared and found. ``ok`` is the verdict."""

    method: str
    rule: str
    lossless: bool
    noise: Noise
    texts: dict[str, int]
    """Texts compared in each mode."""
    tokens: dict[str, int]
    differences: list[Difference] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)
    """Where a text without speculation is not what one plain forward of it chooses."""
    skipped: str | None = None
    """Why one mode could not be run."""
    drafted: dict[str, int] = field(default_factory=dict)
    """Tokens that were drafted in each mode."""
    drafts_expected: bool = True
    """Whether there is a drafter, so that texts without any drafts test nothing of it."""
    stopped_of: int | None = None
    """The texts that there were to be in all modes, where Ctrl-C came before all of them."""

    @property
    def ok(self) -> bool:
        """Whether something was drafted in each mode, every difference is a near-tie, and scoring
        is within rounding."""
        if self.undrafted:
            return False
        bugs = [one.bug for one in self.differences] + [one.bug for one in self.deviations]
        return not self.noise.excessive and not any(bugs)

    @property
    def undrafted(self) -> list[str]:
        """The modes of which texts were compared, and in which nothing was drafted for them though
        there is a drafter."""
        modes = [mode for mode, count in self.texts.items() if count]
        return [mode for mode in modes if self.drafts_expected and not self.drafted.get(mode)]


def audit_diff(
    engines: dict[Mode, LLM],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    tolerance: float | None = None,
    skipped: str | None = None,
    report: Report = silent,
) -> DiffReport:
    """Returns the differences between texts with and without speculation; at Ctrl-C those of the
    texts that were compared, or ``KeyboardInterrupt`` where there are none.

    engines: one whose rule is meant to be audited under greedy decoding, and the same with
    ``verify="coupled"``. tolerance: in logits; unset: measured on this model, see `noise.measure`.
    report: is called with each step that is done, and with the number of all.

    Raises ``ConfigError`` where there is no prompt or no engine to compare texts of.
    """
    if not engines or not prompts or not all(prompts):
        raise ConfigError("an audit needs an engine and prompts of one token or more.")
    params = params or SamplingParams(max_tokens=64)
    prompts = [*prompts, *([*prompt][:SHORT] for prompt in prompts if len(prompt) > SHORT)]
    llm = next(iter(engines.values()))
    steps = _Steps(len(prompts), len(engines), report)
    noise = _noise(llm, prompts, tolerance, steps)
    none: dict[str, int] = {mode: 0 for mode in engines}
    found = _Comparison({**none}, {**none}, {**none})
    stopped = False
    try:
        for mode, engine in engines.items():
            _compare(engine, mode, prompts, params, noise.tolerance, found, steps)
    except KeyboardInterrupt:
        if not any(found.texts.values()):
            raise
        stopped = True
    rule = llm.engine.verifier.rule
    return DiffReport(
        method=llm.config.method,
        rule=rule.name,
        lossless=rule.lossless,
        noise=noise,
        texts=found.texts,
        tokens=found.tokens,
        differences=found.differences,
        deviations=found.deviations,
        skipped=skipped,
        drafted=found.drafted,
        drafts_expected=llm.engine.drafter.max_draft_tokens > 0,
        stopped_of=len(prompts) * len(engines) if stopped else None,
    )


@dataclass
class _Comparison:
    """What the texts that were compared so far show."""

    texts: dict[str, int]
    tokens: dict[str, int]
    drafted: dict[str, int]
    differences: list[Difference] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)


@dataclass
class _Steps:
    """Counts what takes time: each text plainly and speculatively, and the looking at both."""

    prompts: int
    modes: int
    report: Report

    def done(self, what: str) -> None:
        """Learns that one more step is done."""
        self.report(what, self.prompts * (1 + 3 * self.modes))


def _compare(
    llm: LLM,
    mode: Mode,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tolerance: float,
    found: _Comparison,
    steps: _Steps,
) -> None:
    """Adds what the texts of one mode show, as soon as texts of some prompts are there.

    Prompts of one length are given together: they end in the pass of their first round, and others
    do not.
    """
    for numbers in _calls(prompts, AT_ONCE * llm.engine.target.max_rows):
        listed = [prompts[number] for number in numbers]
        asked = [_params(mode, params, number) for number in numbers]
        off = [replace(one, speculative="off") for one in asked]
        plain = list(_texts(llm, listed, off, f"{mode}, plain", steps))
        speculative = _texts(llm, listed, asked, f"{mode}, speculative", steps)
        for place, theirs in enumerate(speculative):
            triage = _Triage.of(llm, mode, listed[place], asked[place], tolerance)
            difference = triage.first_difference(numbers[place], plain[place], theirs)
            deviating = triage.deviations(numbers[place], plain[place])
            found.differences += [] if difference is None else [difference]
            found.deviations += deviating
            found.drafted[mode] += theirs.metrics.num_draft_tokens
            found.tokens[mode] += len(plain[place].token_ids)
            found.texts[mode] += 1
            steps.done(f"{mode}, compared")


def _texts(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    what: str,
    steps: _Steps,
) -> Iterator[CompletionOutput]:
    """Yields the text of each prompt as soon as it and those before it are there."""
    for output in llm.generate_each(prompts, params):
        steps.done(what)
        yield output.outputs[0]


def _params(mode: Mode, params: SamplingParams, number: int) -> SamplingParams:
    if mode == "greedy":
        return replace(params, temperature=0.0)
    return replace(params, temperature=params.temperature or 1.0, seed=(params.seed or 0) + number)


def _calls(prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Returns which prompts are given in one call: short ones of one length, and all others, but no
    more than ``most``."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_length[min(len(prompt), SHORT + 1)].append(number)
    short = [numbers for length, numbers in by_length.items() if length <= SHORT]
    alike = [numbers for numbers in short if len(numbers) > 1]
    taken = {number for numbers in alike for number in numbers}
    others = [number for number in range(len(prompts)) if number not in taken]
    calls = [*alike, others]
    return [call[at : at + most] for call in calls for at in range(0, len(call), most)]


def _noise(
    llm: LLM, prompts: Sequence[Sequence[int]], tolerance: float | None, steps: _Steps
) -> Noise:
    # Prompts, and what plain greedy decoding makes of them: the texts that will be compared.
    wanted = SamplingParams(temperature=0.0, max_tokens=2 * drafted(llm) + 2, speculative="off")
    outputs = _texts(llm, prompts, [wanted] * len(prompts), "measuring rounding", steps)
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    noise = measure(llm.engine.target, texts, drafted(llm), llm.engine.drafter.trees)
    return noise if tolerance is None else replace(noise, tolerance=tolerance)


def drafted(llm: LLM) -> int:
    """Returns how many tokens a round drafts at most, as far as the configuration tells."""
    count = llm.config.num_speculative_tokens
    return count if isinstance(count, int) else 5


@dataclass(frozen=True)
class _Triage:
    """One pair of texts, and what is needed to choose their tokens again."""

    llm: LLM
    choice: Choice
    ending: Ending

    @classmethod
    def of(
        cls, llm: LLM, mode: Mode, prompt: Sequence[int], params: SamplingParams, tolerance: float
    ) -> _Triage:
        """Returns the triage of the texts that an engine makes of one prompt."""
        # As requests have them, with what the model's own generation_config adds.
        request = llm.requests(prompt, params)[0]
        vocabulary, room = llm.target.vocabulary, llm.max_model_len - len(prompt)
        return cls(
            llm,
            Choice(mode == "coupled", prompt, request.options, vocabulary, tolerance),
            Ending(request.params.shortened(room), request.eos_ids, vocabulary, llm.tokenizer),
        )

    def deviations(self, number: int, plain: CompletionOutput) -> list[Deviation]:
        """Returns what is wrong with the text without speculation."""
        target = self.llm.engine.target
        return list(deviations(target, self.choice, self.ending, number, plain))

    def first_difference(
        self, number: int, plain: CompletionOutput, speculative: CompletionOutput
    ) -> Difference | None:
        """Returns where the texts part, or None."""
        ours, theirs = plain.token_ids, speculative.token_ids
        if ours == theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        at = len(common)
        wanted = ours[at] if at < len(ours) else None
        got = theirs[at] if at < len(theirs) else None
        rows = self._rows(common)
        gap = float("inf")
        if wanted is not None and got is not None:
            gap = self.choice.gap(rows[0], common, wanted, got)
        return Difference(
            mode="coupled" if self.choice.coupled else "greedy",
            prompt=number,
            position=at,
            plain=wanted,
            speculative=got,
            gap=gap,
            tolerance=self.choice.allowance,
            scoring=float((rows[0] - rows[1]).abs().max()),
            plain_text=self._decode(wanted),
            speculative_text=self._decode(got),
            lossy=not self.llm.engine.verifier.rule.lossless,
        )

    def _rows(self, common: list[int]) -> tuple[Tensor, Tensor]:
        """Both rows of logits ``[V']`` after the common text."""
        target, ids = self.llm.engine.target, [*self.choice.prompt, *common]
        chain = min(drafted(self.llm), len(common), len(ids) - 1)
        scored = score_as_drafted(target, ids, chain, self.llm.engine.drafter.trees)
        return target.forward_uncached(ids, last=1)[-1].double(), scored[-1].double()

    def _decode(self, token: int | None) -> str:
        decoder = self.llm.input_processor.decoder
        return "" if decoder is None or token is None else decoder.token(token)
