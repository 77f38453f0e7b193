"""A conversation that goes on: questions are answered, commands are carried out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outpace.api import LLM
from outpace.cli import report
from outpace.cli.conversation.answer import Answer, answer
from outpace.cli.conversation.screen import Screen
from outpace.cli.conversation.turns import Conversation, Exchange
from outpace.cli.conversation.window import fitted
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.targets.describe import short_name

ANSWER_TOKENS = 1024
"""Longest answer of a model that says nothing about it, where no flag does."""


@dataclass
class Session:
    """The model, the conversation so far, and how the next answer will be made."""

    llm: LLM
    params: SamplingParams
    screen: Screen
    conversation: Conversation = field(default_factory=Conversation)
    answers: list[Metrics] = field(default_factory=list)
    """What each answer cost, of those that were undone or regenerated too."""
    used: int = 0
    """Tokens of the context that the last question and its answer filled."""
    file: Path | None = None
    """Where the conversation was last saved or loaded."""
    stopped: bool = False
    """Whether the user stopped the last answer before its end."""
    unanswered: bool = False
    """Whether that was before its first word, so that the question was not kept."""
    wants_stop: Callable[[], bool] = lambda: False
    """Whether the user asks an answer to stop after its present round."""

    def __post_init__(self) -> None:
        if self.params.max_tokens is None and "max_new_tokens" not in self.llm.target.defaults:
            self.params = dataclasses.replace(self.params, max_tokens=ANSWER_TOKENS)

    @property
    def last(self) -> Metrics:
        """What the last answer cost; zeros before the first."""
        return self.answers[-1] if self.answers else Metrics()

    def ask(self, question: str) -> None:
        """Answers a question and keeps both; ``OutpaceError`` where it cannot be asked."""
        self.stopped = self.unanswered = False
        forgotten = self.conversation.forgotten
        longest = self.llm.resolve(self.params).max_tokens or ANSWER_TOKENS
        ids = fitted(self.llm, self.conversation, question, longest)
        if self.conversation.forgotten > forgotten:
            self.screen.notice(self._forgot())
        found = answer(self.llm, ids, self.params, self.screen, self.wants_stop)
        self.screen.end(report.cost(found.metrics))
        self.answers.append(found.metrics)
        self.stopped = found.stopped
        self.used = len(ids) + found.metrics.num_emitted_tokens
        self._keep(question, found)

    def _keep(self, question: str, found: Answer) -> None:
        if found.stopped and not found.text:
            self.unanswered = True
            self.screen.notice("stopped before the first word; the question is not kept")
            return
        self.conversation.add(Exchange(question, found.text, found.stopped))
        if found.stopped:
            self.screen.notice("stopped; what was said is kept (/undo takes it back)")
        elif found.finish_reason == "length":
            self.screen.notice(
                f"cut off at {found.metrics.num_emitted_tokens} tokens{self._more()}"
            )

    def _more(self) -> str:
        full = self.used >= self.llm.max_model_len
        return ", where the context ends" if full else ": /set max_tokens N allows more"

    def _forgot(self) -> str:
        count = self.conversation.forgotten
        return (
            f"the context holds {self.llm.max_model_len} tokens: the oldest "
            f"{'exchange is' if count == 1 else f'{count} exchanges are'} no longer shown to the "
            "model (/save keeps them, /reset begins anew)"
        )

    # -- what is told about it ---------------------------------------------------------------------

    @property
    def method(self) -> str:
        """How the next answer will be drafted: "draft_model, K 5", or "plain"."""
        wanted = self.params.speculative
        if self.llm.config.method == "none" or wanted in ("off", 0):
            return "plain"
        count = self.llm.config.num_speculative_tokens if wanted is None else wanted
        return f"{self.llm.config.method}, K {count}"

    @property
    def status(self) -> str:
        """One line: the method, what the last answer cost, the options and the model.

        What matters most comes first, since a narrow terminal cuts the rest off.
        """
        resolved, last = self.llm.resolve(self.params), self.last
        parts = [self.method]
        if last.num_emitted_tokens:
            parts.append(f"{last.tokens_per_second:.1f} tokens/s")
        if last.acceptance_rate is not None:
            length = last.mean_acceptance_length
            parts.append(f"acceptance {last.acceptance_rate:.0%}, {length:.1f} tokens per pass")
        parts.append("greedy" if resolved.greedy else f"temperature {resolved.temperature:g}")
        parts.append(f"{self.used} of {self.llm.max_model_len} tokens")
        parts.append(Path(short_name(self.llm.target.name)).name)
        return " | ".join(parts)

    @property
    def statistics(self) -> str:
        """What the last answer and all of them together cost."""
        if not self.answers:
            return "nothing was answered yet"
        everything = report.merged(self.answers, sum(part.total_seconds for part in self.answers))
        return (
            f"last answer: {report.cost(self.last)}\n"
            f"all {len(self.answers)}: {report.cost(everything)}"
        )
