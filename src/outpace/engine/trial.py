"""Whether a drafter was made for the target at all: found out by a few rounds, when it is loaded.

A head that was trained for another model of the same shape drafts as quickly as any, and next to
none of its tokens is taken. Nothing else would tell: the text is right all the same, only slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.request import Request
from outpace.engine.verifier import Verifier
from outpace.errors import ConfigError
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

OPTIONS = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True, speculative=1)
"""Of the texts: greedy, one drafted token in each round."""


def trial_prompts(tokenizer: Any, vocabulary: int, longest: int) -> list[list[int]]:
    """Returns prompts of at most so many tokens. Without a tokenizer they are arbitrary tokens:
    the target goes on with something all the same."""
    if tokenizer is None:
        arbitrary = [[(7 + 31 * row + 13 * at) % vocabulary for at in range(8)] for row in range(4)]
        return [prompt[:longest] for prompt in arbitrary]
    return [tokenizer(text)["input_ids"][:longest] for text in TEXTS]


def try_out(engine: Engine, requests: Sequence[Request], what: str) -> None:
    """Plays rounds until enough drafted tokens were those of the target. Their rows are gone then,
    and the controller has learned from their rounds.

    what: the drafter, for the ``ConfigError`` that is raised where next to none was.
    """
    accepted = drafted = 0
    # The user's own rule may be a lossy one, which refuses or accepts for other reasons.
    own, engine.verifier = engine.verifier, Verifier(make_rule("match"))
    try:
        for request in requests:
            engine.add(request)
        while accepted < ENOUGH and drafted < MOST and engine.busy:
            engine.step()
            accepted = sum(request.metrics.num_accepted_tokens for request in requests)
            drafted = sum(request.metrics.num_draft_tokens for request in requests)
    finally:
        engine.verifier = own
        for request in requests:
            if not request.finished:
                engine.remove(request)
    if accepted < ENOUGH and drafted >= MOST:
        raise ConfigError(
            f"{what} was trained for another model, or hardly at all: this target accepted "
            f"{accepted} of the {drafted} tokens that it drafted. Train one for this target, or "
            "set 'check' to false in speculative_config to use it all the same."
        )
