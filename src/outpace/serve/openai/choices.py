"""One text of an answer, as it is streamed and as it is told whole.

Both are made from the same deltas, so that what a stream says, joined together, is the whole
answer.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.core.detokenizer import Detokenizer
from outpace.engine.request import Logprob
from outpace.serve.jobs import Delta
from outpace.serve.openai.token_texts import TokenTexts
from outpace.serve.openai.tool_parser import ToolCall, ToolParser


class Choice(ABC):
    """One text of an answer.

    alternatives: how many of the most probable tokens are reported beside each token; None: no
    log-probabilities at all. texts: how tokens are written beside these.
    """

    def __init__(self, index: int, alternatives: int | None, texts: TokenTexts) -> None:
        self.index = index
        self._alternatives = alternatives
        self._texts = texts
        self._finish_reason: str | None = None

    @abstractmethod
    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        """Returns what a stream says of it, as items of ``choices``."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Returns the finished text as an item of ``choices``."""

    def opening(self) -> list[dict[str, Any]]:
        """Returns what a stream begins with."""
        return []


class TextChoice(Choice):
    """A text of ``/v1/completions``.

    growing: the same text at its beginning, which says where in it each token is; None without a
    tokenizer.
    """

    def __init__(
        self,
        index: int,
        alternatives: int | None,
        texts: TokenTexts,
        growing: Detokenizer | None,
    ) -> None:
        super().__init__(index, alternatives, texts)
        self._text = ""
        self._growing = growing
        self._logprobs: dict[str, list[Any]] = _no_logprobs()

    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        self._text += delta.text
        self._finish_reason = delta.finish_reason
        logprobs = None if self._alternatives is None else self._reported(delta)
        return [
            {
                "index": self.index,
                "text": delta.text,
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
            }
        ]

    def whole(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": self._text,
            "logprobs": None if self._alternatives is None else self._logprobs,
            "finish_reason": self._finish_reason,
        }

    def _reported(self, delta: Delta) -> dict[str, list[Any]]:
        found = _no_logprobs()
        for token, probs in zip(delta.tokens, delta.logprobs, strict=True):
            ranked = dict(_ranked(probs, self._alternatives or 0, token))
            keys = self._texts.keys(ranked, token)
            found["tokens"].append(keys[token])
            found["token_logprobs"].append(_finite(probs[token].logprob))
            found["top_logprobs"].append(
                {
                    keys[other]: _finite(distribution.logprob)
                    for other, distribution in ranked.items()
                }
            )
            found["text_offset"].append(self._place(token))
        for name, values in found.items():
            self._logprobs[name] += values
        return found

    def _place(self, token: int) -> int:
        """How many characters of the text are complete before the next token: all parts of a
        character have the character's place."""
        if self._growing is None:
            return 0
        place = len(self._growing.text)
        self._growing.push(token)
        return place


class ChatChoice(Choice):
    """A text of ``/v1/chat/completions``."""

    def __init__(
        self, index: int, alternatives: int | None, texts: TokenTexts, parses_tools: bool = False
    ) -> None:
        super().__init__(index, alternatives, texts)
        self._parser = ToolParser() if parses_tools else None
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> list[dict[str, Any]]:
        return [self._item({"role": "assistant", "content": ""})]

    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        found = [self._part(part) for part in self._parts(delta)]
        self._finish_reason = delta.finish_reason
        if self._calls and delta.finish_reason == "stop":
            self._finish_reason = "tool_calls"
        items = [self._item(part) for part in found]
        ended = delta.finish_reason is not None
        logprobs = None if self._alternatives is None else self._reported(delta)
        if ended or (logprobs and not items):
            items.append(self._item({}))
        if logprobs:
            items[0]["logprobs"] = {"content": logprobs}
        if ended:
            items[-1]["finish_reason"] = self._finish_reason
        return items

    def whole(self) -> dict[str, Any]:
        content = self._content if self._content or not self._calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"}
                for call in self._calls
            ]
        logprobs = None if self._alternatives is None else {"content": self._logprobs}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }

    def _parts(self, delta: Delta) -> list[str | ToolCall]:
        if self._parser is None:
            return [delta.text] if delta.text else []
        parts = self._parser.feed(delta.text)
        return parts + self._parser.finish() if delta.finish_reason else parts

    def _part(self, part: str | ToolCall) -> dict[str, Any]:
        if isinstance(part, str):
            self._content += part
            return {"content": part}
        call = {
            "index": len(self._calls),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }
        self._calls.append(call)
        return {"tool_calls": [call]}

    def _item(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _reported(self, delta: Delta) -> list[dict[str, Any]]:
        found = [
            {
                **self._distribution(token, probs[token]),
                "top_logprobs": [
                    self._distribution(other, distribution)
                    for other, distribution in _ranked(probs, self._alternatives or 0, None)
                ],
            }
            for token, probs in zip(delta.tokens, delta.logprobs, strict=True)
        ]
        self._logprobs += found
        return found

    def _distribution(self, token: int, distribution: Logprob) -> dict[str, Any]:
        return {
            "token": self._texts.in_chat(token),
            "logprob": _finite(distribution.logprob),
            "bytes": self._texts.bytes_of(token),
        }


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _ranked(
    probs: Mapping[int, Logprob], count: int, own: int | None
) -> Sequence[tuple[int, Logprob]]:
    """Returns the most probable tokens, best first, and ``own``, which completions report too."""
    ranked = sorted(probs.items(), key=lambda entry: entry[1].rank)
    return [entry for entry in ranked if entry[1].rank <= count or entry[0] == own]


def _finite(logprob: float) -> float:
    """Returns a log-probability; JSON has no minus infinity, so OpenAI writes -9999."""
    return max(logprob, -9999.0)
