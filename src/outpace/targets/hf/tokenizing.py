"""From a text to token ids, by the tokenizer of a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase


def tokenized(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of a text.

    tokenizer: transformers' own, or what is called like one.
    """
    # A text longer than the model takes is refused where its length is known. transformers would
    # besides write a warning of its own, about indexing errors that do not come.
    quiet = {"verbose": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, **quiet).input_ids
    return ids
