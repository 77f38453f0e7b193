"""How fast a model would write with some of its sub-layers left out of its drafts.

Real rounds are played, one prompt at a time, with drafts of a fixed length. They tell how many of
the drafted tokens are accepted, under the caches that drafting really has, and what a drafting and
a scoring pass take. From these the tokens per second follow for any length of the drafts, and the
best length counts. Counting the tokens of a few short texts against the clock would be noisier:
medians of passes leave out what else the machine did, and one scoring time serves all trials.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from outpace.api import LLM
from outpace.bench.builtin import BUILT_IN
from outpace.core.params import SamplingParams
from outpace.core.stats import Seconds
from outpace.draft.itself.layer_skip import LayerSkip
from outpace.engine.trace import Observer, RoundTrace
from outpace.errors import ConfigError
from outpace.targets.base import SubLayers

KEPT = 400
"""Latest rounds of which the median times are taken."""

UNSURE = 1.0
"""Accepted and refused tokens that are added at each depth, half each, so that a few lucky tokens
do not count as certainty."""


@dataclass
class Outcome:
    """What the rounds of one choice of sub-layers have shown."""

    drafted: list[int]  # by depth
    accepted: list[int]
    drafting: list[float] = field(default_factory=list)  # seconds per drafted token

    def rates(self) -> list[float]:
        """Returns, by depth, the share of drafted tokens there that were accepted, given that those
        before them were."""
        found = []
        for depth, accepted in enumerate(self.accepted):
            reached = self.drafted[depth] if depth == 0 else self.accepted[depth - 1]
            found.append((accepted + UNSURE / 2) / (reached + UNSURE))
        return found

    def acceptance(self) -> float:
        """Returns the share of the drafted tokens that were accepted."""
        return sum(self.accepted) / max(1, sum(self.drafted))


@dataclass(frozen=True)
class Prediction:
    """What a choice of sub-layers promises."""

    tokens_per_second: float
    drafted: int
    """Tokens per draft with which that is reached."""
    acceptance: float


class LayerTrials:
    """Plays rounds of one model with different sub-layers left out."""

    def __init__(self, llm: LLM, prompts: Sequence[str], tokens: int, temperature: float) -> None:
        """llm: with the method "layer_skip" and drafts of a fixed length. tokens: of each text."""
        drafter, count = llm.engine.drafter, llm.config.num_speculative_tokens
        if not isinstance(drafter, LayerSkip) or not isinstance(count, int):
            raise ConfigError("layers are tuned with layer_skip and a fixed number of tokens.")
        self._llm, self._drafter, self._depth = llm, drafter, count
        SamplingParams(temperature=temperature, max_tokens=tokens)  # refuses what is none
        self._prompts, self._tokens, self._temperature = list(prompts), tokens, temperature
        self._plain: deque[Seconds] = deque(maxlen=KEPT)
        self._scored: deque[Seconds] = deque(maxlen=KEPT)

    @property
    def setting(self) -> dict[str, Any]:
        """What the predictions of all trials depend on, besides the model: those of other prompts
        and options cannot be compared with them."""
        listed, target = json.dumps(self._prompts).encode(), self._llm.target
        return {
            "prompts": hashlib.sha256(listed).hexdigest()[:16],
            "tokens": self._tokens,
            "temperature": self._temperature,
            "dtype": str(target.dtype).removeprefix("torch."),
            "quantization": target.quantization or "none",
            "device": target.device.type,
            "threads": torch.get_num_threads(),
        }

    @property
    def prompts(self) -> int:
        """How many prompts each trial plays."""
        return len(self._prompts)

    def measure_plain(self) -> float:
        """Returns the tokens per second of plain decoding, which everything is compared with."""
        for number in range(len(self._prompts)):
            self._play(number, "off", self._note_plain)
        return 1 / median(seconds.total for seconds in self._plain)

    def play(self, skipped: SubLayers) -> Iterator[Prediction]:
        """Yields after each prompt what the rounds so far promise."""
        self._drafter.leave_out(skipped)
        outcome = Outcome([0] * self._depth, [0] * self._depth)
        for number in range(len(self._prompts)):
            self._play(number, None, lambda trace: self._note(trace, outcome))
            if outcome.drafting:
                yield self._prediction(outcome)

    def _play(self, number: int, speculative: Literal["off"] | None, observer: Observer) -> None:
        params = SamplingParams(
            temperature=self._temperature,
            seed=number,
            max_tokens=self._tokens,
            ignore_eos=True,
            speculative=speculative,
        )
        with self._llm.engine.observing(observer):
            self._llm.generate(self._prompts[number], params)

    def _note_plain(self, trace: RoundTrace) -> None:
        self._plain.append(trace.seconds)

    def _note(self, trace: RoundTrace, outcome: Outcome) -> None:
        (decision,) = trace.decisions
        if decision.drafted != self._depth:
            return  # the first round, which reads the prompt, and the last one
        for depth in range(decision.drafted):
            outcome.drafted[depth] += 1
            outcome.accepted[depth] += depth < len(decision.path)
        outcome.drafting.append(trace.seconds.draft / decision.drafted)
        self._scored.append(trace.seconds)

    def _prediction(self, outcome: Outcome) -> Prediction:
        """The draft length with the most tokens per second: 1 + a1 + a1 a2 + ... for the time of a
        round, in which a drafted token costs a pass of the drafter and its share of the scoring."""
        drafting = median(outcome.drafting)
        plain = median(seconds.total for seconds in self._plain)
        whole = median(seconds.score + seconds.rest for seconds in self._scored)
        more = max(0.0, whole - plain) / self._depth  # what scoring one token more takes
        tokens, reached = 1.0, 1.0
        best = Prediction(0.0, 0, outcome.acceptance())
        for drafted, rate in enumerate(outcome.rates(), 1):
            reached *= rate
            tokens += reached
            speed = tokens / (plain + drafted * (drafting + more))
            if speed > best.tokens_per_second:
                best = Prediction(speed, drafted, outcome.acceptance())
        return best


def built_in_prompts() -> list[str]:
    """Returns prompts of different kinds, for where none are given."""
    kinds = {task: text for _, task, text in BUILT_IN}
    return list(kinds.values())
