"""One engine of a diagnosis: its parts timed alone, and the rounds of the texts that it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from outpace.bench.run.meter import Meter
from outpace.bench.stats.payoff import PlayedDraft
from outpace.bench.stats.theory import Times
from outpace.core.params import SamplingParams
from outpace.core.stats import Seconds
from outpace.engine.trace import RoundTrace
from outpace.llm import LLM

REPEATS = 5
"""Timings of each part in one sample; a diagnosis takes two samples."""


@dataclass(frozen=True)
class TextRound:
    """One round of a text, behind the one that read its prompt."""

    draft: PlayedDraft
    seconds: Seconds
    is_chain: bool
    begins: bool
    """Whether it is the first round of its text in which something was drafted: a draft model reads
    the prompt in it."""


def play(llm: LLM, prompt: Sequence[int], tokens: int) -> list[TextRound]:
    """Returns the rounds of a greedy text of at most n tokens, drafted as ``llm`` drafts."""
    found: list[TextRound] = []

    def note(trace: RoundTrace) -> None:
        (decision,) = trace.decisions
        if len(trace.requests[0].output_ids) == trace.emitted[0]:
            return  # the first round reads the prompt, too
        draft = PlayedDraft(decision.drafted, len(decision.path))
        begins = draft.drafted > 0 and not any(each.draft.drafted for each in found)
        found.append(TextRound(draft, trace.seconds, decision.depth == draft.drafted, begins))

    with llm.engine.observing(note):
        llm.generate([list(prompt)], SamplingParams(temperature=0, max_tokens=tokens))
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
        """The lengths of drafts that its rounds tell something of: of chains each one up to the
        longest, of trees only the number of nodes that they had."""
        rounds = self.rounds
        most = max((each.draft.drafted for each in rounds), default=0) or 1
        return range(1, most + 1) if all(each.is_chain for each in rounds) else [most]
