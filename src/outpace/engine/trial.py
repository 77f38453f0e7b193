"""Whether a drafter was made for the target at all: found out by a few rounds, when it is loaded.

A head that was trained for another model of the same shape drafts as quickly as any, and next to
none of its tokens is taken. Nothing else would tell: the text is right all the same, only slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.params import SamplingParams
from outpace.draft.base import Drafter, Round
from outpace.engine.engine import Engine
from outpace.engine.request import Request
from outpace.engine.verifier import Verifier
from outpace.errors import ConfigError
from outpace.policy.lengths.constant import Constant
from outpace.verify.registry import make_rule

TEXTS = (
    "Once upon a time, there was a little girl who lived with her mother in a small house.",
    "def total(values):\n    found = 0\n    for value in values:\n",
    "Question: What is the capital of France, and what is it known for?\nAnswer:",
    "The weather in the north of the country is cold in winter and",
)
"""What the target goes on with. Several kinds: a head may have learned from one of them only."""

ENOUGH, MOST = 5, 96
"""Accepted tokens at which all is well; drafted ones after which fewer are too few. A head of
which a fiftieth is accepted is refused in 95 of 100 cases, one of a sixth in 1 of 1000."""

TRIAL = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True)
"""How the texts of a trial are generated."""


def trial_prompts(tokenizer: Any, vocabulary: int, longest: int) -> list[list[int]]:
    """Returns prompts of at most ``longest`` tokens. Without a tokenizer they are arbitrary tokens:
    the target goes on with something all the same."""
    if tokenizer is None:
        arbitrary = [[(7 + 31 * row + 13 * at) % vocabulary for at in range(8)] for row in range(4)]
        return [prompt[:longest] for prompt in arbitrary]
    return [tokenizer(text)["input_ids"][:longest] for text in TEXTS]


@dataclass
class _Record:
    """What was drafted in the trial, and what was accepted of it."""

    drafted: int = 0
    accepted: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether it is known that it was made for the target, or that it was not."""
        return self.accepted >= ENOUGH or self.drafted >= MOST


def try_out(engine: Engine, drafter: Drafter, requests: Sequence[Request]) -> None:
    """Plays rounds of one token until enough that the drafter drafted were the target's, or all the
    texts have ended. Their rows are gone then. Raises ``ConfigError`` where next to none was.

    drafter: the engine's, or one of those that it stands for, which is tried by itself.
    """
    record = _Record()

    def count(round: Round) -> None:
        for outcome in round.outcomes:
            record.drafted += outcome.drafted
            record.accepted += len(outcome.path)

    # The user's own rule may be a lossy one, which refuses or accepts for other reasons.
    verifier = Verifier(make_rule("match"))
    with engine.playing_with(drafter, verifier, Constant(1)), engine.observing(count):
        try:
            for request in requests:
                engine.add(request)
            while engine.busy and not record.is_settled:
                engine.step()
        finally:
            for request in requests:
                if not request.finished:
                    engine.remove(request)
    if record.accepted < ENOUGH and record.drafted >= MOST:
        raise ConfigError(
            f"{drafter.on_trial} was trained for another model, or hardly at all: this target "
            f"accepted {record.accepted} of the {record.drafted} tokens that it drafted. Train one "
            "for this target, or set 'check' to false in its speculative_config to use it all the "
            "same."
        )
