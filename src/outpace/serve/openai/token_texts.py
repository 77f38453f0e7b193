"""Tokens as OpenAI's API writes them next to their log-probabilities.

A part of a character has no text. Completions name it by its bytes, ``bytes:\\xe6\\x97``, and chats
write ``\\xe6\\x97`` and the bytes themselves as numbers. What has neither text nor bytes is named
as vLLM names tokens, ``token_id:123``.
"""

from __future__ import annotations

from collections.abc import Iterable

from outpace.core.detokenizer import UNFINISHED
from outpace.core.text_decoder import TextDecoder


class TokenTexts:
    """decoder: makes text of tokens; None without a tokenizer."""

    def __init__(self, decoder: TextDecoder | None) -> None:
        self._decoder = decoder

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
        raw = None if self._decoder is None else self._decoder.token_bytes(token)
        return None if raw is None else list(raw)

    def _written(self, token: int, prefix: str) -> str:
        if self._decoder is None:
            return _numbered(token)
        text = self._decoder.token(token)
        if UNFINISHED not in text:
            return text
        raw = self._decoder.token_bytes(token)
        if raw is None:
            return _numbered(token)
        try:
            return raw.decode()  # U+FFFD itself
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _numbered(token: int) -> str:
    return f"token_id:{token}"
