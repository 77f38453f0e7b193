"""Trials when a model is loaded: of a drafter that may have been made for another target, and of a
target that promises the same logits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.draft.base import Drafter, Round
from outpace.engine.engine import Engine
from outpace.engine.request import EngineRequest
from outpace.engine.verifier import Verifier
from outpace.errors import ConfigError
from outpace.policy.lengths.adaptive import Constant
from outpace.targets.base import PromptInputs, ScoreInputs, Target
from outpace.verify.registry import make_rule

TEXTS = (
    "Once upon a time, there was a little girl who lived with her mother in a small house.",
    "def total(values):\n    found = 0\n    for value in values:\n",
    "Question: What is the capital of France, and what is it known for?\nAnswer:",
    "The weather in the north of the country is cold in winter and",
)
"""What the target goes on with. Several kinds: a head may have learned from one of them only."""

MIN_ACCEPTED, MAX_DRAFTED = 5, 96
"""Accepted tokens at which all is well; drafted ones after which fewer are too few. A head of
which a fiftieth is accepted is refused in 95 of 100 cases, one of a sixth in 1 of 1000."""

TRIAL = SamplingParams(temperature=0, max_tokens=MAX_DRAFTED, ignore_eos=True)
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
    def is_decided(self) -> bool:
        """Whether it is known that it was made for the target, or that it was not."""
        return self.accepted >= MIN_ACCEPTED or self.drafted >= MAX_DRAFTED


def verify_drafter(engine: Engine, drafter: Drafter, requests: Sequence[EngineRequest]) -> None:
    """Finds out whether a drafter was made for the target at all.

    A head that was trained for another model of the same shape drafts as quickly as any, and next
    to none of its tokens is taken. Nothing else would tell: the text is right all the same, only
    slow.

    Runs rounds of one token until enough that the drafter drafted were the target's, or all the
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
    with engine.override_parts(drafter, verifier, Constant(1)), engine.observing(count):
        try:
            for request in requests:
                engine.add(request)
            while engine.has_unfinished_requests and not record.is_decided:
                engine.step()
        finally:
            for request in requests:
                if not request.finished:
                    engine.remove(request)
    if record.accepted < MIN_ACCEPTED and record.drafted >= MAX_DRAFTED:
        raise ConfigError(
            f"{drafter.capabilities.verify_on_load} was trained for another model, or hardly at "
            f"all: this target accepted {record.accepted} of the {record.drafted} tokens that it "
            "drafted. Train one for this target, or set 'check' to false in its speculative_config "
            "to use it all the same."
        )


PROMPT, TOKENS = 20, 12
"""Tokens that the trial's text begins with, and tokens after them that are compared."""

DRAFTED = 5
"""Tokens that are scored as a draft, at most."""

COMPANY = 3
"""Texts that are scored at once, at most."""


@torch.inference_mode()
def verify_invariance(target: Target, name: str, vocabulary: int) -> None:
    """Compares a text's logits, fed one token at a time and alone, with those of the same tokens as
    drafts and with other texts. The target has no rows before, and none afterwards.

    name: of the model, for the sentence of the ``ConfigError`` that is raised where any bit of
    these differs.
    """
    trial = _Trial(target, vocabulary)
    try:
        alone = trial.logits(rows=1, drafted=0)
        drafted = min(DRAFTED, target.max_nodes)
        counts = {1, min(COMPANY, target.max_rows)}
        same = all(torch.equal(alone, trial.logits(rows, drafted)) for rows in counts)
    finally:
        target.retain([])
    if not same:
        dtype = str(target.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} on {target.device} in {dtype} gives a token other logits with other tokens "
            "than alone: leave batch_invariant out."
        )


class _Trial:
    """Has a target score the same text in several ways."""

    def __init__(self, target: Target, vocabulary: int) -> None:
        self._target, self._vocabulary = target, vocabulary
        self._count = min(TOKENS, target.max_length - 1)
        self._prompt = max(1, min(PROMPT, target.max_length - self._count))

    def _token(self, row: int, at: int) -> int:
        return (7 + 31 * row + 13 * at) % self._vocabulary

    def logits(self, rows: int, drafted: int) -> Tensor:
        """Returns the logits ``[T, V]`` after each token of the first text from the last one of
        its prompt on, with ``drafted`` drafted ones in a pass, and ``rows`` texts: the others have
        shorter prompts."""
        target = self._target
        target.retain([])
        lengths = [max(1, self._prompt - 3 * row) for row in range(rows)]
        for row, length in enumerate(lengths):
            target.admit(PromptInputs([self._token(row, at) for at in range(length)]))
        while target.num_ready_rows < target.num_rows:
            target.prefill(PROMPT)
        found: list[Tensor] = []
        begin = 0  # tokens that were fed since
        while begin < self._count:
            end = min(begin + 1 + drafted, self._count)
            fed = [
                [self._token(row, length - 1 + at) for at in range(begin, end)]
                for row, length in enumerate(lengths)
            ]
            found.append(self._scored(fed))
            begin = end
        return torch.cat(found)

    def _scored(self, fed: Sequence[Sequence[int]]) -> Tensor:
        """The logits after the first text's tokens, of which the first is pending and the others
        are a draft that is accepted."""
        target, drafted = self._target, len(fed[0]) - 1
        nodes = to_device([row[1:] for row in fed], target.device).reshape(len(fed), drafted)
        tree = Tree.chain(len(fed), drafted, target.device)
        scores = target.score(ScoreInputs([row[:1] for row in fed], nodes, tree))
        found = scores.logits[0].clone()
        target.commit([range(1, drafted + 1)] * len(fed))
        return found
