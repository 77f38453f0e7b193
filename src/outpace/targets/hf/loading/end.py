"""A token that ends texts, and who says so."""

from __future__ import annotations

from dataclasses import dataclass

GENERATION_CONFIG = "generation_config"
TOKENIZER = "the tokenizer's eos_token"
TEMPLATE = "the chat template"


@dataclass(frozen=True)
class End:
    """``str()`` gives the token with its sources.

    >>> str(End(2, "</s>", ("generation_config", "the chat template")))
    "'</s>' (generation_config, the chat template)"
    """

    token: int
    text: str
    """As the vocabulary writes it; its number without a tokenizer."""
    sources: tuple[str, ...]
    """Who names it: the model's generation_config, the tokenizer, the chat template; of a GGUF
    file, the field of the file, or its text by which it is known."""
    chats_only: bool = False
    """Whether it ends the answers of chats, and no other texts."""

    def __str__(self) -> str:
        chats = " in chats" if self.chats_only else ""
        return f"{self.text!r}{chats} ({', '.join(self.sources)})"
