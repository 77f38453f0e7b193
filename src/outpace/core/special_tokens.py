"""Special tokens: texts leave them out, but for those that are to be read in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the tokens that are left out where special tokens are skipped, with their texts."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {token: entry.content for token, entry in added.items() if entry.special}
    own = getattr(tokenizer, "all_special_ids", ())
    return found | dict(zip(own, getattr(tokenizer, "all_special_tokens", ()), strict=True))


class SpecialTokenFilter:
    """A tokenizer whose texts hold some special tokens, although they leave out the others.

    hidden: the special tokens that texts leave out.
    """

    def __init__(self, tokenizer: Any, hidden: Collection[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, frozenset(hidden)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **options: bool) -> str:
        """Returns the text of tokens. options: further ones of the tokenizer's ``decode``."""
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._hidden]
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, **options))
