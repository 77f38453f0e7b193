"""Answers in OpenAI's form: whole, or as a stream of events. Both are made from the same deltas, so
that what a stream says, joined together, is the whole answer."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from outpace.core.detokenizer import UNFINISHED, Detokenizer
from outpace.core.text_decoder import TextDecoder
from outpace.engine.request import EngineRequest, Logprob
from outpace.serve.engine_thread import Delta
from outpace.serve.openai.calls import Call
from outpace.serve.openai.tools import ToolCall, ToolParser

# -- tokens ----------------------------------------------------------------------------------------


class TokenTexts:
    """Tokens as OpenAI's API writes them next to their log-probabilities.

    A part of a character has no text. Completions name it by its bytes, ``bytes:\\xe6\\x97``, and
    chats write ``\\xe6\\x97`` and the bytes themselves as numbers. What has neither text nor bytes
    is named as vLLM names tokens, ``token_id:123``.

    decoder: makes text of tokens; None without a tokenizer.
    """

    def __init__(self, decoder: TextDecoder | None) -> None:
        self._decoder = decoder
        self._known: dict[int, tuple[str | None, bytes | None]] = {}

    def in_completion(self, token: int) -> str:
        """Returns a token's text or name in ``/v1/completions``."""
        return self._written(token, "bytes:")

    def in_chat(self, token: int) -> str:
        """Returns a token's text or name in ``/v1/chat/completions``."""
        return self._written(token, "")

    def keys(self, tokens: Iterable[int], own: int) -> dict[int, str]:
        """Returns names for tokens as keys of one object, in their order. Of several with one text,
        ``own`` has it, or else the first; the others are named by their numbers."""
        listed = list(tokens)
        names = {own: self.in_completion(own)}
        for token in listed:
            name = self.in_completion(token)
            if token != own:
                names[token] = name if name not in names.values() else _numbered(token)
        return {token: names[token] for token in listed}

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns the bytes that a token stands for; None where they are not known."""
        _, raw = self._read(token)
        return None if raw is None else list(raw)

    def _read(self, token: int) -> tuple[str | None, bytes | None]:
        """The text and the bytes of a token, which take the tokenizer some time, and come again."""
        if self._decoder is not None and token not in self._known:
            self._known[token] = self._decoder.token(token), self._decoder.token_bytes(token)
        return self._known.get(token, (None, None))

    def _written(self, token: int, prefix: str) -> str:
        text, raw = self._read(token)
        if text is None:
            return _numbered(token)
        if UNFINISHED not in text:
            return text
        if raw is None:
            return _numbered(token)
        try:
            return raw.decode()  # U+FFFD itself
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _numbered(token: int) -> str:
    return f"token_id:{token}"


# -- one text of an answer -------------------------------------------------------------------------


class Choice(ABC):
    """One text of an answer.

    alternatives: how many of the most probable tokens are reported with each token; None: no
    log-probabilities at all. texts: how tokens are written there.
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
        for token, logprobs in zip(delta.tokens, delta.logprobs, strict=True):
            ranked = dict(_ranked(logprobs, self._alternatives or 0, token))
            keys = self._texts.keys(ranked, token)
            found["tokens"].append(keys[token])
            found["token_logprobs"].append(_finite(logprobs[token].logprob))
            found["top_logprobs"].append(
                {keys[other]: _finite(logprob.logprob) for other, logprob in ranked.items()}
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
                **self._as_openai(token, logprobs[token]),
                "top_logprobs": [
                    self._as_openai(other, logprob)
                    for other, logprob in _ranked(logprobs, self._alternatives or 0, None)
                ],
            }
            for token, logprobs in zip(delta.tokens, delta.logprobs, strict=True)
        ]
        self._logprobs += found
        return found

    def _as_openai(self, token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": self._texts.in_chat(token),
            "logprob": _finite(logprob.logprob),
            "bytes": self._texts.bytes_of(token),
        }


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _ranked(
    logprobs: Mapping[int, Logprob], count: int, own: int | None
) -> Sequence[tuple[int, Logprob]]:
    """Returns the most probable tokens, best first, and ``own``, which completions report too."""
    ranked = sorted(logprobs.items(), key=lambda entry: entry[1].rank)
    best = [token for token, _ in ranked[:count]]
    return [entry for entry in ranked if entry[0] in best or entry[0] == own]


def _finite(logprob: float) -> float:
    """Returns a log-probability; JSON has no minus infinity, so OpenAI writes -9999."""
    return max(logprob, -9999.0)


# -- the answer to a call --------------------------------------------------------------------------

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
        rounds: Callable[[EngineRequest], list[dict[str, Any]]] = lambda request: [],
    ) -> None:
        self.call = call
        self.id = ("chatcmpl-" if call.chat else "cmpl-") + secrets.token_hex(12)
        self._model = model
        self._created = int(time.time())
        self._rounds = rounds
        self._uncounted: Counter[int] = Counter()
        """By choice, the tokens that no event has counted yet: a piece of a call is none."""
        self.choices: list[Choice] = [
            ChatChoice(index, call.logprobs, texts, call.parses_tools)
            if call.chat
            else TextChoice(index, call.logprobs, texts, request.new_detokenizer())
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
            self._uncounted[delta.index] += len(delta.tokens)
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
            extra["tokens"] = self._uncounted.pop(delta.index)
        if delta.finish_reason is not None:
            extra["metrics"] = self._metrics(request)
        return extra

    # -- whole -------------------------------------------------------------------------------------

    def add(self, deltas: Sequence[Delta]) -> None:
        """Takes what has come since the last time, for an answer that is sent whole."""
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
        read, costs = self.call.prompt_tokens, [one.metrics for one in self.call.requests]
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": self.call.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(one.accepted_prediction_tokens for one in costs),
                "rejected_prediction_tokens": sum(one.rejected_prediction_tokens for one in costs),
            },
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _metrics(self, request: EngineRequest) -> dict[str, Any]:
        return {
            **request.metrics.as_dict(),
            "seed": request.seed if request.reports_seed else None,
            "stop_reason": request.stop_reason,
            "preemptions": request.preemptions,
        }
