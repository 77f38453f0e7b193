"""One answer: streamed as it is made, and kept as far as it came if it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from outpace.api import LLM
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics


@dataclass(frozen=True)
class Answer:
    """What the model said."""

    text: str
    metrics: Metrics
    finish_reason: str | None
    """None if it was stopped before its end."""

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.finish_reason is None


def answer(
    llm: LLM, prompt_ids: Sequence[int], params: SamplingParams, show: Callable[[str], None]
) -> Answer:
    """Returns the answer, after each piece of it was shown; Ctrl-C ends it early."""
    text, metrics, reason = "", Metrics(), None
    stream: Any = llm.stream(list(prompt_ids), params)
    with closing(stream):
        try:
            for chunk in stream:
                text, metrics, reason = text + chunk.text, chunk.metrics, chunk.finish_reason
                show(chunk.text)
        except KeyboardInterrupt:
            reason = None
    return Answer(text, metrics, reason)
