"""A short measurement of one machine, model and its drafters: ``outpace doctor``.

Parts are timed alone (`Meter`), and a few texts of three kinds are written by look-ups and by each
named model, side by side, with drafts of a fixed length. What is accepted in these says what drafts
of any length up to that one bring for the times of their parts (`payoff`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench.kinds import prompts_of_kinds
from outpace.bench.report.provenance import provenance
from outpace.bench.run.candidates import Candidate
from outpace.bench.run.memory import read_bandwidth
from outpace.bench.run.meter import Meter
from outpace.bench.run.ours import Ours
from outpace.bench.run.session import Engines, Given, lineup
from outpace.draft.route.auto import LOOK_UPS
from outpace.errors import PromptError
from outpace.heads.checkpoint import kind_in
from outpace.targets.describe import short_name
from outpace.targets.hf.loading.loaded import Loaded

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

Tell = Callable[[str, float], None]
"""Is called with what is done next, and the share that is done."""


@dataclass(frozen=True)
class Asked:
    """What is looked at."""

    model: str | Loaded | None
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
        """Returns the engines that take part beside plain decoding."""
        drafting: list[dict[str, Any]] = [
            {"method": kind_in(draft) or "draft_model", "model": draft} for draft in self.drafts
        ]
        if not drafting and self.model is None:
            drafting = [{"method": "draft_model"}]
        models = [{**config, "num_speculative_tokens": self.length} for config in drafting]
        look_ups = {"method": LOOK_UPS[0], "num_speculative_tokens": FOUND}
        return Engines(self.model, (look_ups, *models), self.options)


@dataclass(frozen=True)
class Measured:
    """What was measured, from which all else follows (`outpace.bench.run.findings`)."""

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


def measure(asked: Asked, tell: Tell) -> Measured:
    """Returns what was measured. tell: is told what is done next. Raises ``PromptError`` where the
    built-in prompts cannot be used, and as `LLM` does."""
    facts = provenance()  # before the rest, so that the load is not the measurement's own
    tell("loading", 0)
    plain, *others = _candidates(asked)
    chat = bool(getattr(plain.llm.tokenizer, "chat_template", None))
    prompts = _prompts(plain, chat)
    tell("reading memory", 0.05)
    bandwidth = read_bandwidth(plain.llm.target.device)
    tell("timing passes", 0.1)
    _sample(plain, others)
    alone = plain.meter.times.verifying(1)
    tokens = asked.max_tokens or tokens_within(SECONDS, len(prompts), alone)
    _write(plain, others, _fitting(prompts, tokens, plain), tokens, tell)
    tell("timing passes again", 0.9)
    _sample(plain, others)
    return Measured(facts, plain, others, bandwidth, tokens, chat)


def tokens_within(seconds: float, prompts: int, a_pass: float) -> int:
    """Returns how many tokens of each text plain decoding writes in these seconds, for all prompts
    together, between `FEWEST` and `MOST`.

    >>> tokens_within(20.0, 12, 0.04), tokens_within(20.0, 12, 1.0), tokens_within(20.0, 12, 0.001)
    (41, 16, 64)
    """
    return max(FEWEST, min(MOST, int(seconds / (prompts * a_pass))))


def _candidates(asked: Asked) -> list[Candidate]:
    """Plain decoding, look-ups, then each named model, over one target."""
    found = [each for each in lineup(asked.engines(), 1).contestants if isinstance(each, Ours)]
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
    plain: Candidate, others: Sequence[Candidate], prompts: Prompts, tokens: int, tell: Tell
) -> None:
    """Writes the texts, all candidates side by side. Plain decoding writes the first of each kind
    only: its rounds are all alike."""
    known: set[str] = set()
    for number, (kind, ids) in enumerate(prompts):
        tell(f"writing text {number + 1} of {len(prompts)}", 0.15 + 0.75 * number / len(prompts))
        present = list(others) if kind in known else [plain, *others]
        for each in present[:: -1 if number % 2 else 1]:
            each.write(kind, ids, tokens)
        known.add(kind)
    if plain.plain_seconds is None:
        raise PromptError(
            f"{short_name(plain.llm.target.name)} ends its answers to the built-in prompts "
            "at once, which leaves nothing to measure: take prompts of your own with outpace bench "
            "run --prompts FILE."
        )
