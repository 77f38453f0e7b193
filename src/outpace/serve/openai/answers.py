"""Answers in OpenAI's form: whole, or as a stream of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from outpace.engine.request import Request
from outpace.serve.jobs import Delta
from outpace.serve.openai.calls import Call
from outpace.serve.openai.choices import ChatChoice, Choice, TextChoice
from outpace.serve.openai.token_texts import TokenTexts

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(body: Any) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


class Answer:
    """The answer to one call, fed with deltas as they come.

    rounds: what is added of a request's rounds where the call is traced.
    """

    def __init__(
        self,
        call: Call,
        model: str,
        texts: TokenTexts,
        rounds: Callable[[Request], list[dict[str, Any]]] = lambda request: [],
    ) -> None:
        self.call = call
        self.id = ("chatcmpl-" if call.chat else "cmpl-") + secrets.token_hex(12)
        self._model = model
        self._created = int(time.time())
        self._rounds = rounds
        self.choices: list[Choice] = [
            ChatChoice(index, call.logprobs, texts, call.parses_tools)
            if call.chat
            else TextChoice(index, call.logprobs, texts, request.growing())
            for index, request in enumerate(call.requests)
        ]

    # -- as a stream -------------------------------------------------------------------------------

    def opening(self) -> Iterator[bytes]:
        """Yields the events that a stream begins with."""
        for choice in self.choices:
            for item in choice.opening():
                yield event(self._chunk([item]))

    def feed(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yields the events of what has come since the last time."""
        for delta in deltas:
            items = self.choices[delta.index].feed(delta)
            for item in items:
                chunk = self._chunk([item])
                if item is items[-1] and (extra := self._extra(delta)):
                    chunk["outpace"] = extra
                yield event(chunk)

    def closing(self) -> Iterator[bytes]:
        """Yields the events that a stream ends with."""
        if self.call.usage:
            yield event({**self._chunk([]), "usage": self.usage()})
        yield DONE

    def _chunk(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.call.chat else "text_completion"
        body = {**self._head(kind), "choices": items}
        return {**body, "usage": None} if self.call.usage else body

    def _extra(self, delta: Delta) -> dict[str, Any]:
        """What outpace adds to the events: rounds where they are traced, how many tokens have come
        where they are counted, and at the end what the text has cost."""
        request = self.call.requests[delta.index]
        extra: dict[str, Any] = {}
        if self.call.trace:
            extra["rounds"] = self._rounds(request)
        if self.call.counts:
            extra["tokens"] = len(delta.tokens)
        if delta.finish_reason is not None:
            extra["metrics"] = self._metrics(request)
        return extra

    # -- whole -------------------------------------------------------------------------------------

    def add(self, deltas: Sequence[Delta]) -> None:
        """Takes what has come since the last time, for an answer that is told whole."""
        for delta in deltas:
            self.choices[delta.index].feed(delta)

    def whole(self) -> dict[str, Any]:
        """Returns the finished answer."""
        kind = "chat.completion" if self.call.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": [choice.whole() for choice in self.choices],
            "usage": self.usage(),
            "outpace": {"metrics": [self._metrics(request) for request in self.call.requests]},
        }

    def usage(self) -> dict[str, Any]:
        """Returns how many tokens were read and written."""
        written = sum(len(request.output_ids) for request in self.call.requests)
        read = self.call.prompt_tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": self.call.cached_tokens},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _metrics(self, request: Request) -> dict[str, Any]:
        return {
            **request.metrics.as_dict(),
            "seed": request.seed if request.repeats else None,
            "stop_reason": request.stop_reason,
            "preemptions": request.preemptions,
        }
