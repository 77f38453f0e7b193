"""How far a lossy rule is from the target's distribution on given prompts: a short run, watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outpace.bench.stats.divergence import Divergence, watching
from outpace.core.params import SamplingParams
from outpace.inputs.prompts import Prompt
from outpace.llm import LLM

TEXTS = 4
TOKENS = 64
"""Tokens of all texts together."""
CHAIN = 5
"""Tokens of a draft where the engine chooses how many."""


@dataclass(frozen=True)
class Replay:
    """What a lossy rule did to the distribution, or why that is not known."""

    rule: str
    divergence: Divergence | None
    blocked: bool = False
    """Whether something was drafted that could not be measured."""

    @property
    def sentence(self) -> str:
        """What is to be said beside the speed."""
        if self.divergence is not None:
            return f"verify={self.rule} is lossy: {self.divergence.phrase}"
        if self.blocked:
            return (
                f"verify={self.rule} is lossy, by how much is not known: what it looks at is only "
                "computed for tokens that were drafted, and these were drawn (greedy texts can be "
                "measured)"
            )
        return f"verify={self.rule} is lossy, but nothing was drafted: nothing was changed"

    def as_dict(self) -> dict[str, Any]:
        """Returns the object that ``--json`` shows."""
        found = {"unmeasured": self.sentence} if self.divergence is None else {}
        known = {} if self.divergence is None else asdict(self.divergence)
        return {"rule": self.rule, **known, **found}


def replay(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> Replay | None:
    """Returns what the engine's rule does to the distribution of the first `TEXTS` prompts, under
    the same options and seed; None for a lossless rule, at no cost. Where the engine chooses how
    much is drafted, the same number is drafted in all of these rounds.
    """
    rule = llm.engine.verifier.rule
    if rule.lossless:
        return None
    listed = list(prompts[:TEXTS])
    limit = max(1, TOKENS // len(listed))
    wanted = llm.resolve(params).max_tokens or limit
    count = llm.config.num_speculative_tokens
    if count == "auto":
        shape = llm.engine.drafter.shape
        count = CHAIN if shape is None else shape.size
    few = params.shortened(min(limit, wanted))
    short = replace(few, n=1, logprobs=None, speculative=count)
    with watching(llm) as watch:
        llm.generate(listed, short)
    return Replay(rule.name, watch.divergence(), blocked=watch.blocked)
