"""A short measurement of one machine, model and its drafters: ``outpace doctor``.

Parts are timed alone (`Meter`), and a few texts of three kinds are written by look-ups and by each
named model, side by side, with drafts of a fixed length. What is accepted in these says what drafts
of any length up to that one bring for the times of their parts (`payoff`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from outpace.bench.contest import OutpaceContestant
from outpace.bench.meter import Meter
from outpace.bench.prompts import prompts_of_kinds
from outpace.bench.provenance import provenance
from outpace.bench.roofline import read_bandwidth
from outpace.bench.session import Engines, Given, lineup
from outpace.bench.theory import PlayedDraft, Times
from outpace.core.params import SamplingParams
from outpace.core.progress import Progress
from outpace.core.stats import Seconds
from outpace.draft.base import Round
from outpace.errors import PromptError
from outpace.heads.checkpoint import find_head_kind
from outpace.llm import LLM
from outpace.methods.choosers.auto import LOOK_UPS
from outpace.targets.describe import short_name
from outpace.targets.hf.loading.loaded import LoadedModel

REPEATS = 5
"""Timings of each part in one sample; a diagnosis takes two samples."""


@dataclass(frozen=True)
class TextRound:
    """One round of a text, after the one that read its prompt."""

    draft: PlayedDraft
    seconds: Seconds
    is_chain: bool
    begins: bool
    """Whether it is the first round of its text in which something was drafted: a draft model reads
    the prompt in it."""


def play(llm: LLM, prompt: Sequence[int], tokens: int) -> list[TextRound]:
    """Returns the rounds of a greedy text of at most n tokens, drafted as ``llm`` drafts."""
    found: list[TextRound] = []

    def note(round: Round) -> None:
        (outcome,) = round.outcomes
        if len(round.requests[0].output_ids) == outcome.emitted:
            return  # the first round reads the prompt, too
        if outcome.emitted <= len(outcome.path):
            return  # the text ended in its draft, which brought less than it would have
        draft = PlayedDraft(outcome.drafted, len(outcome.path))
        begins = draft.drafted > 0 and not any(each.draft.drafted for each in found)
        found.append(TextRound(draft, round.seconds, outcome.depth == draft.drafted, begins))

    with llm.engine.observing(note):
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens))
    return found


@dataclass
class Candidate:
    """An engine with one way to draft, or plain decoding."""

    llm: LLM
    meter: Meter
    longest: int
    """Tokens of its drafts, at most."""
    texts: dict[str, list[list[TextRound]]] = field(default_factory=dict)
    """By kind of prompts, the rounds of each text."""

    def sample(self, columns: Iterable[int] = ()) -> None:
        """Times its drafts, and the target's passes over these numbers of columns."""
        plain = self.llm.config.method == "none"
        drafts = () if plain else {1, self.longest}
        self.meter.sample(drafts, columns, REPEATS)

    def write(self, kind: str, prompt: Sequence[int], tokens: int) -> None:
        """Writes the text of a prompt, if that has a second round."""
        rounds = play(self.llm, prompt, tokens)
        if rounds:
            self.texts.setdefault(kind, []).append(rounds)

    @property
    def rounds(self) -> list[TextRound]:
        """Those of all texts."""
        return [each for texts in self.texts.values() for text in texts for each in text]

    @property
    def plain_seconds(self) -> float | None:
        """The seconds of a round without a draft, all included; None where there was none."""
        seconds = [each.seconds.total for each in self.rounds if not each.draft.drafted]
        return median(seconds) if seconds else None

    def times(self, verify: Mapping[int, float]) -> Times:
        """Returns the times of its rounds' parts. verify: the target's, of its passes alone. What
        a round takes besides (`besides`) is put with its pass."""
        alone = Times(self.meter.times.draft, verify)
        more = self.besides(alone)
        return Times(alone.draft, {n: seconds + more for n, seconds in verify.items()})

    def besides(self, alone: Times) -> float:
        """Returns the seconds that a round takes more than its parts alone: the engine's own work,
        and what is slower in real texts. Below 0 where the parts were timed in a slower moment."""
        rounds = [each for each in self.rounds if not each.begins]
        more = [each.seconds.total - alone.round(each.draft.drafted) for each in rounds]
        return median(more) if more else 0.0

    @property
    def reading_seconds(self) -> float | None:
        """The seconds that a draft model takes to read a prompt before its first draft; None where
        no model of its own drafts, or nothing was drafted."""
        found = [
            each.seconds.draft - self.meter.times.drafting(each.draft.drafted)
            for each in self.rounds
            if each.begins
        ]
        if self.llm.engine.drafter.loaded is None or not found:
            return None
        return max(0.0, median(found))

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths of drafts that its rounds say something about: of chains each one up to the
        longest, of trees only the number of nodes that they had."""
        rounds = self.rounds
        most = max((each.draft.drafted for each in rounds), default=0) or 1
        return range(1, most + 1) if all(each.is_chain for each in rounds) else [most]


# -- the measurement ---------------------------------------------------------------------------


CONTEXT = 128
"""Cached tokens in the passes that are timed."""
COLUMNS = (1, 2, 4, 8)
"""Columns of the passes that are shown."""
FOUND = 8
"""Tokens of a draft of a look-up, at most. They cost nothing until they are scored."""
SECONDS = 20.0
"""What the texts of one drafter may take, about."""
FEWEST, MOST = 16, 64
"""Tokens of a text at most, whatever that takes."""


@dataclass(frozen=True)
class DoctorOptions:
    """What is looked at."""

    model: str | LoadedModel | None
    """As `Engines.model`."""
    options: Mapping[str, Any]
    """Other arguments of `LLM`."""
    drafts: tuple[str, ...] = ()
    """Draft models and heads. None: only look-ups, and for the bundled target its own drafter."""
    length: int = 5
    """Tokens of a model's drafts, at most."""
    max_tokens: int | None = None
    """Tokens of a text, at most; None: as many as `SECONDS` allow."""

    def engines(self) -> Engines:
        """Returns the engines that take part besides plain decoding."""
        drafting: list[dict[str, Any]] = [
            {"method": find_head_kind(draft) or "draft_model", "model": draft}
            for draft in self.drafts
        ]
        if not drafting and self.model is None:
            drafting = [{"method": "draft_model"}]
        models = [{**config, "num_speculative_tokens": self.length} for config in drafting]
        look_ups = {"method": LOOK_UPS[0], "num_speculative_tokens": FOUND}
        return Engines(self.model, (look_ups, *models), self.options)


@dataclass(frozen=True)
class Measured:
    """What was measured, from which all else follows (`outpace.bench.findings`)."""

    facts: Mapping[str, str]
    """As `provenance` returns them."""
    plain: Candidate
    others: Sequence[Candidate]
    """Look-ups, then each named model."""
    bandwidth: float
    """Bytes that are read in a second."""
    tokens: int
    """Tokens of a text, at most."""
    chat: bool
    """Whether prompts were given through the chat template."""


def measure(asked: DoctorOptions, report: Progress) -> Measured:
    """Returns what was measured. report: is called with what is done next. Raises ``PromptError``
    where the built-in prompts cannot be used, and as `LLM` does."""
    facts = provenance()  # before the rest, so that the load is not the measurement's own
    report("loading", 0)
    plain, *others = _candidates(asked)
    chat = bool(plain.llm.input_processor.ends.template())
    prompts = _prompts(plain, chat)
    report("reading memory", 0.05)
    bandwidth = read_bandwidth(plain.llm.target.device)
    report("timing passes", 0.1)
    _sample(plain, others)
    alone = plain.meter.times.verifying(1)
    tokens = asked.max_tokens or tokens_within(SECONDS, len(prompts), alone)
    _write(plain, others, _fitting(prompts, tokens, plain), tokens, report)
    report("timing passes again", 0.9)
    _sample(plain, others)
    return Measured(facts, plain, others, bandwidth, tokens, chat)


def tokens_within(seconds: float, prompts: int, a_pass: float) -> int:
    """Returns how many tokens of each text plain decoding writes in these seconds, for all prompts
    together, between `FEWEST` and `MOST`.

    >>> tokens_within(20.0, 12, 0.04), tokens_within(20.0, 12, 1.0), tokens_within(20.0, 12, 0.001)
    (41, 16, 64)
    """
    return max(FEWEST, min(MOST, int(seconds / (prompts * a_pass))))


def _candidates(asked: DoctorOptions) -> list[Candidate]:
    """Plain decoding, look-ups, then each named model, over one target."""
    found = [
        each
        for each in lineup(asked.engines(), 1).contestants
        if isinstance(each, OutpaceContestant)
    ]
    context = min(CONTEXT, found[0].llm.max_model_len // 4)
    longest = [0, FOUND, *[asked.length] * (len(found) - 2)]
    return [
        Candidate(ours.llm, Meter(ours.llm, 1, context), length)
        for ours, length in zip(found, longest, strict=True)
    ]


def _sample(plain: Candidate, others: Sequence[Candidate]) -> None:
    """Times all parts. Done before the texts and again after them, so that both see the same
    machine."""
    plain.sample({*COLUMNS, *(each.longest + 1 for each in others)})
    for each in others:
        each.sample()


Prompts = Sequence[tuple[str, list[int]]]
"""The kind and the tokens of each prompt."""


def _prompts(plain: Candidate, chat: bool) -> Prompts:
    """The built-in prompts, the kinds in turns."""
    kinds = prompts_of_kinds(chat)
    encode = Given((), chat).encoder(plain.llm)
    turns = zip(*kinds.values(), strict=True)
    return [
        (kind, encode(each.text)) for turn in turns for kind, each in zip(kinds, turn, strict=True)
    ]


def _fitting(prompts: Prompts, tokens: int, plain: Candidate) -> Prompts:
    most = plain.llm.max_model_len
    found = [(kind, ids) for kind, ids in prompts if len(ids) + tokens <= most]
    if not found:
        raise PromptError(
            f"no built-in prompt leaves room for {tokens} tokens in a context of {most}: give a "
            "smaller --max-tokens."
        )
    return found


def _write(
    plain: Candidate, others: Sequence[Candidate], prompts: Prompts, tokens: int, report: Progress
) -> None:
    """Writes the texts, all candidates side by side. Plain decoding writes the first of each kind
    only: its rounds are all alike."""
    known: set[str] = set()
    for number, (kind, ids) in enumerate(prompts):
        report(f"writing text {number + 1} of {len(prompts)}", 0.15 + 0.75 * number / len(prompts))
        present = list(others) if kind in known else [plain, *others]
        for each in present[:: -1 if number % 2 else 1]:
            each.write(kind, ids, tokens)
        known.add(kind)
    if plain.plain_seconds is None or not all(each.texts for each in others):
        raise PromptError(
            f"{short_name(plain.llm.target.name)} ends its answers to the built-in prompts "
            "at once, which leaves nothing to measure: take prompts of your own with outpace bench "
            "run --prompts FILE."
        )
