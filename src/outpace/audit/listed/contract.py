"""Where a text must end, told from its tokens alone, and what is wrong with one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.params import SamplingParams
from outpace.outputs import CompletionOutput


@dataclass(frozen=True)
class Ending:
    """What ends a text; ``params`` resolved. Knows nothing of how the engine cuts texts."""

    params: SamplingParams
    eos_ids: tuple[int, ...]
    vocabulary: int
    tokenizer: Any = None

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the text, given that none before it did."""
        params, last = self.params, tokens[-1]
        if last in self.eos_ids and not params.ignore_eos:
            return True
        if last in params.stop_token_ids or len(tokens) == params.max_tokens:
            return True
        return self._said(tokens)

    def _said(self, tokens: Sequence[int]) -> bool:
        if not self.params.stop_strings or len(tokens) < (self.params.min_tokens or 0):
            return False
        text = self._decode(tokens)
        known = len(self._decode(tokens[:-1]))
        return any(
            text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self.params.stop_strings
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=self.params.skip_special_tokens
        )
        return text

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens up to the first that ends the text."""
        for length in range(1, len(tokens) + 1):
            if self.ends(tokens[:length]):
                return list(tokens[:length])
        return list(tokens)

    def breaches(self, output: CompletionOutput) -> Iterator[str]:
        """Yields, in words, each way in which a finished text is not one of plain decoding."""
        tokens = output.token_ids
        beyond = [token for token in tokens if token >= self.vocabulary]
        if beyond:
            yield f"emits token {beyond[0]}, which the tokenizer does not have"
        if len(self.cut(tokens)) < len(tokens):
            yield f"goes on for {len(tokens) - len(self.cut(tokens))} tokens after its end"
        elif not tokens or not self.ends(tokens):
            yield f"stops after {len(tokens)} tokens for no reason"
        stops = self.params.stop_strings
        if stops and not self.params.include_stop_str_in_output:
            shown = [stop for stop in stops if stop in output.text]
            if shown and len(tokens) > (self.params.min_tokens or 0):
                yield f"shows the stop string {shown[0]!r}"
