"""How a text is spelt in tokens where its form is given: by none that answers leave out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from outpace.forms.mentions import settled


class Spelling:
    """A tokenizer as llguidance asks for one.

    Special tokens are no text, since answers leave them out: what reads like one is spelt in other
    tokens. All others are text, also those that were added to the vocabulary, such as Qwen's
    ``<tool_call>``. llguidance by itself takes these for special, and offers either kind where a
    form demands its text, which the token is not.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: Sequence[int]) -> None:
        from llguidance.hf import from_tokenizer

        # Without slices, which make masks faster: it makes none.
        self._plain = from_tokenizer(tokenizer, vocabulary, list(eos_ids), slices=[])
        added = tokenizer.added_tokens_decoder
        self._words = {
            token: entry.content
            for token, entry in added.items()
            if not entry.special and token not in eos_ids and token < vocabulary
        }
        names = tokenizer.convert_ids_to_tokens(list(eos_ids))
        self._ends = dict(zip(names, eos_ids, strict=True))
        self.eos_token_id = eos_ids[0]
        self.tokens = [self._plain.decode_bytes([token]) for token in range(vocabulary)]
        self.special_token_ids = [token for token in range(vocabulary) if self._is_special(token)]

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens as which llguidance writes a text that a form demands."""
        found = self._plain.tokenize_bytes(text)
        spelt = [part for token in found for part in self._spelt.get(token, (token,))]
        if self._plain.decode_bytes(spelt) == text:
            return spelt
        return list(self._plain.greedy_tokenize(text.decode(errors="replace")))

    def named(self, grammar: str) -> str:
        """Returns a grammar in Lark's notation as llguidance has to be told of the tokens that it
        names (`outpace.forms.mentions`)."""
        numbers = {word: token for token, word in self._words.items()}
        return settled(grammar, numbers, self._ends)

    @cached_property
    def _spelt(self) -> dict[int, list[int]]:
        """The other tokens that read like a special one."""
        special = self.special_token_ids
        return {token: self._plain.greedy_tokenize(self._read(token)) for token in special}

    def _read(self, token: int) -> str:
        return str(self.tokens[token].decode(errors="replace"))

    def _is_special(self, token: int) -> bool:
        return self._plain.is_special_token(token) and token not in self._words
