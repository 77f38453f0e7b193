"""One text in the making: its tokens, its stop conditions, its counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.core.law import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.engine.text import Detokenizer, StopStrings
from outpace.errors import OutpaceError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the law that it was drawn from, and its rank (from 1)."""

    logprob: float
    rank: int
    decoded_token: str | None = None
    """The token's text, as `CompletionOutput` fills it in; None without a tokenizer."""


@dataclass(eq=False)
class Request:
    """A prompt, its resolved options and what has been generated.

    ``stop_when`` is a caller's own condition: it sees all ids after each token.
    """

    prompt_ids: list[int]
    options: RowOptions
    seed: int
    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    stop_when: Callable[[list[int]], bool] | None = None
    streaming: bool = False
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or string that ended the text; None for end of sequence or length."""
    error: OutpaceError | None = None
    """Why the text could not go on, if its finish reason is that."""
    metrics: Metrics = field(default_factory=Metrics)
    _cut: int | None = None
    _shown: int = 0

    def __post_init__(self) -> None:
        params = self.params
        self._strings = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        # Decoding token by token is only worth its time where the text is needed on the way.
        follows = self.streaming or bool(params.stop_strings)
        self._text = self._detokenizer() if follows and self.tokenizer is not None else None

    @property
    def params(self) -> SamplingParams:
        return self.options.params

    @property
    def length(self) -> int:
        """Committed tokens, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.output_ids)

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    def extend(self, tokens: Sequence[int]) -> int:
        """Appends tokens until one of them ends the text; returns how many were taken.

        What follows the end is neither emitted nor counted.
        """
        for taken, token in enumerate(tokens, 1):
            self.output_ids.append(token)
            if self._ends(token):
                return taken
        return len(tokens)

    def _ends(self, token: int) -> bool:
        begin = len(self._text.text) if self._text else 0
        if self._text:
            self._text.push(token)
        if token in self.eos_ids and not self.params.ignore_eos:
            return self._finish("stop")
        if token in self.params.stop_token_ids:
            return self._finish("stop", token)
        if self._text and self._strings_end(begin):
            return True
        if self.stop_when is not None and self.stop_when([*self.prompt_ids, *self.output_ids]):
            return self._finish("stop")
        if len(self.output_ids) >= self.max_tokens:
            return self._finish("length")
        return False

    def _strings_end(self, begin: int) -> bool:
        if self._text is None or len(self.output_ids) < (self.params.min_tokens or 0):
            return False
        found = self._strings.find(self._text.text, begin)
        if found is None:
            return False
        self._cut, string = found
        return self._finish("stop", string)

    def _finish(self, reason: FinishReason, cause: int | str | None = None) -> bool:
        self.finish_reason, self.stop_reason = reason, cause
        if self._text is not None and self._cut is None:
            self._text.finish()
        return True

    def abort(self) -> None:
        """Ends the text where it is."""
        if self.finish_reason is None:
            self._finish("abort")

    def fail(self, error: OutpaceError) -> None:
        """Ends the text where it is, for a reason of its own."""
        self.error = error
        self._finish("error")

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer, self.params.skip_special_tokens)

    @property
    def text(self) -> str:
        """The text so far, without what a stop string cut off; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        if self._text is None:
            decoded: str = self.tokenizer.decode(
                self.output_ids, skip_special_tokens=self.params.skip_special_tokens
            )
            return decoded
        return self._text.text[: self._cut]

    def new_text(self) -> str:
        """Returns the text that has become safe to show since the last call (streaming)."""
        text = self.text
        end = len(text) if self.finish_reason else self._strings.safe(text)
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        return piece
