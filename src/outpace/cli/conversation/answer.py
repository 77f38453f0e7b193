"""One answer: streamed as it is made, and kept as far as it came if it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.api import LLM
from outpace.cli.conversation.interrupts import READ_AT_ONCE
from outpace.cli.conversation.screen import Screen
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.engine.request import Request


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
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    screen: Screen,
    wants_stop: Callable[[], bool] = lambda: False,
) -> Answer:
    """Returns the answer, after each piece of it was shown.

    It ends early once ``wants_stop`` says so, between two rounds, after which the prompt and what
    was said are still cached; and at once where ``KeyboardInterrupt`` comes.
    """
    (request,) = llm.requests(prompt_ids, params, streaming=True, keep_cached=True)
    pieces: list[str] = []
    stopped = False
    try:
        llm.engine.add(request)
        while not (request.finished or (stopped := wants_stop())):
            screen.working(_reading(llm, request))
            llm.engine.step()
            piece = request.new_text()
            if piece:
                screen.working("")
                pieces.append(piece)
                screen.piece(piece)
    except KeyboardInterrupt:
        stopped = True
    finally:
        screen.working("")
        llm.engine.remove(request)
    if request.error is not None:
        raise request.error
    reason = None if stopped else request.finish_reason
    return Answer("".join(pieces), request.metrics, reason)


def _reading(llm: LLM, request: Request) -> str:
    """What to say while a long prompt is read; nothing once there is a token."""
    read, length = llm.engine.tokens_read(request), len(request.prompt_ids)
    if request.output_ids or length <= READ_AT_ONCE:
        return ""
    return f"reading: {read} of {length} tokens" if read else f"reading {length} tokens"
