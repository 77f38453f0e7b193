"""One text in the making: its tokens, its stop conditions, its counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from outpace.core import request
from outpace.core.detokenizer import Detokenizer
from outpace.core.request import FinishReason as FinishReason
from outpace.core.stats import Metrics
from outpace.core.text_decoder import TextDecoder


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the distribution that it was drawn from, and its rank (from
    1)."""

    logprob: float
    rank: int
    decoded_token: str | None = None
    """The token's text, as `CompletionOutput` fills it in; None without a tokenizer."""


@dataclass(eq=False)
class EngineRequest(request.Request):
    """A request with its text as it grows, and what ends it.

    ``stop_when`` is a caller's own condition: it sees all ids after each token.
    """

    decoder: TextDecoder | None = None
    """What makes text of the tokens; None without a tokenizer."""
    stop_names: Mapping[int, str] = field(default_factory=dict)
    """The stop tokens that a stop string names, each with that string."""
    continues: bool = False
    """Whether the text goes on from the prompt's, blanks included; else it begins anew."""
    stop_when: Callable[[list[int]], bool] | None = None
    streaming: bool = False
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    stop_reason: int | str | None = None
    """The stop token or string that ended the text; None for end of sequence or length."""
    error: Exception | None = None
    """Why the text could not go on, with the finish reason "error"."""
    metrics: Metrics = field(default_factory=Metrics)
    reports_seed: bool = True
    """Whether generating again with ``seed`` gives this text. It does not where the user gave no
    seed, tokens were drafted, and the text follows from what was drafted, as a sampled one does:
    how many depends on measured times and on other texts, and decides which random numbers are
    used."""
    priority: float = 0
    """For a queue that goes by it: the smallest number joins the batch first."""
    client: Hashable = None
    """Who asks, for a queue that is fair to each client."""
    preemptions: int = 0
    """How often it was preempted because all rows together held too many tokens."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not read for this request, because they were cached."""
    admitted_token_ids: list[int] = field(default_factory=list)
    """The tokens that the request had when it joined the batch."""
    _looked_at: int = 0  # tokens whose stop conditions have been looked at
    _extending: tuple[int, Sequence[int], Sequence[dict[int, Logprob]]] | None = None
    """While tokens are appended: how many there were before, and what `extend` was given."""
    _cut: int | None = None
    _textless: bool = False  # whether the last token, which ends the text, is not part of it
    _shown: int = 0

    def __post_init__(self) -> None:
        params = self.params
        self._strings = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._text = self._new_text()

    def extend(self, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]] = ()) -> int:
        """Appends tokens until one of them ends the text; returns how many were taken.

        What follows the end is neither emitted nor counted. An exception in the request's own code
        (its stop condition, its tokenizer) ends this text with that error, and nothing else.

        logprobs: what is reported of each token, if that was asked for.
        """
        taken = 0
        self._extending = len(self.output_ids), tokens, logprobs
        for token in tokens:
            if self.finished:
                break
            self.logprobs += logprobs[taken : taken + 1]  # first: no token is ever without them
            self.output_ids.append(token)
            taken += 1
            self._look()
        self._extending = None
        return taken

    def finish_extend(self) -> None:
        """Makes up for an `extend` that was interrupted: its last token is looked at, and the
        others follow."""
        del self.logprobs[len(self.output_ids) :]
        self._finish_looking()
        if self._extending is not None:
            begin, tokens, logprobs = self._extending
            taken = len(self.output_ids) - begin
            self.extend(tokens[taken:], logprobs[taken:])

    def _finish_looking(self) -> None:
        if self._looked_at == len(self.output_ids) or self.finished:
            return
        looked_at, self._looked_at = self._looked_at, 0
        self._text = self._new_text()
        if self._text is not None:
            for token in self.output_ids[:looked_at]:
                self._text.push(token)
        self._looked_at = looked_at
        while self._looked_at < len(self.output_ids) and not self.finished:
            self._look()

    def _look(self) -> None:
        """Looks at the stop conditions of the first token that was not looked at yet."""
        try:
            self._ends(self.output_ids[self._looked_at])
        except Exception as error:
            self.fail(error)
        self._looked_at += 1

    def _ends(self, token: int) -> bool:
        count = self._looked_at + 1
        begin = len(self._text.text) if self._text else 0
        is_eos = token in self.eos_ids and not self.params.ignore_eos
        # Not every tokenizer calls the end of a turn special, which would keep it out.
        self._textless = is_eos and self.params.skip_special_tokens
        if self._text:
            if not self._textless:
                self._text.push(token)
            if is_eos or token in self.params.stop_token_ids or count >= self.max_tokens:
                self._text.finish()  # what was held back may hold a stop string
            if self._strings_end(begin, count):
                return True
        if is_eos:
            return self._finish("stop", self.stop_names.get(token))
        if token in self.params.stop_token_ids:
            return self._finish("stop", self.stop_names.get(token, token))
        if self.stop_when is not None and self.stop_when(
            [*self.prompt_ids, *self.output_ids[:count]]
        ):
            return self._finish("stop")
        if count >= self.max_tokens:
            return self._finish("length")
        return False

    def _strings_end(self, begin: int, count: int) -> bool:
        if self._text is None or count < (self.params.min_tokens or 0):
            return False
        found = self._strings.find(self._text.text, begin)
        if found is None:
            return False
        self._cut, string = found
        return self._finish("stop", string)

    def _finish(self, reason: FinishReason, cause: int | str | None = None) -> bool:
        self.finish_reason, self.stop_reason = reason, cause
        return True

    def abort(self) -> bool:
        """Ends the text where it is; returns False where it had ended already."""
        return not self.finished and self._finish("abort")

    def fail(self, error: Exception) -> None:
        """Ends the text where it is, for a reason of its own; nothing happens to one that has
        ended."""
        if not self.finished:
            self.error = error
            self._finish("error")

    def _new_text(self) -> Detokenizer | None:
        # Decoding token by token is only worth its time where the text is needed on the way.
        follows = self.streaming or bool(self.params.stop_strings)
        return self.new_detokenizer() if follows else None

    def new_detokenizer(self) -> Detokenizer | None:
        """Returns the text of this request at its beginning; None without a tokenizer."""
        if self.decoder is None:
            return None
        return self.decoder.new_detokenizer(self.params.skip_special_tokens, self.continues)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns what the text would be with these tokens, stop strings aside; "" without a
        tokenizer."""
        if self.decoder is None:
            return ""
        return self.decoder.text(tokens, self.params.skip_special_tokens, self.continues)

    @property
    def text(self) -> str:
        """The text so far, without what a stop string cut off; "" without a tokenizer."""
        if self._text is None:
            found = self.decode(self.output_ids[:-1] if self._textless else self.output_ids)
        else:
            if self.finished and self._cut is None:
                self._text.finish()
            found = self._text.text[: self._cut]
        return found + self._named_stop

    @property
    def _named_stop(self) -> str:
        """The stop string that ended the text as a token, where stop strings are part of it."""
        named = self._cut is None and self.stop_reason in self.stop_names.values()
        return str(self.stop_reason) if named and self.params.include_stop_str_in_output else ""

    def new_text(self) -> str:
        """Returns the text that has become safe to show since the last call (streaming)."""
        ended = self.finished
        text = self.text
        if not ended and (self.finished or self._looked_at < len(self.output_ids)):
            return ""  # another thread looks for what ends the text: not before it has
        end = len(text) if ended else self._strings.safe(text)
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        return piece


class StopStrings:
    """Finds the first stop string in a growing text, and what of the text is safe to show.

    >>> stop = StopStrings(("END",), include=False)
    >>> stop.find("so it E", 0), stop.safe("so it E"), stop.find("so it ENDs", 6)
    (None, 6, (6, 'END'))
    """

    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._sorted = sorted(strings)
        self._longest = max((len(string) for string in strings), default=0)
        self._include = include

    def find(self, text: str, begin: int) -> tuple[int, str] | None:
        """Returns where to cut the text and why, if a stop string ends after ``begin``.

        Of several, the one that ends first counts.
        """
        found = []
        for string in self._strings:
            at = text.find(string, max(0, begin - len(string) + 1))
            if at >= 0:
                found.append((at + len(string), at, string))
        if not found:
            return None
        end, start, string = min(found)
        return (end if self._include else start), string

    def safe(self, text: str) -> int:
        """Returns how many characters no stop string can swallow any more."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if self._begins_one(text[begin:]):
                return begin
        return len(text)

    def _begins_one(self, text: str) -> bool:
        """Whether a stop string begins so. Of all strings in their order, the first that does not
        come before the text is the only one that has to be looked at."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)
