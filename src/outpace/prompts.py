"""Prompts as they are given: texts, token ids, or dicts of either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outpace.errors import PromptError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of the two as ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``."""


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts of a call, one or several; ``PromptError`` for none."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise PromptError(f"prompts must be texts or lists of token ids, not {prompts!r}.")
    found: list[Any] = list(prompts)
    if not found:
        raise PromptError("no prompt was given.")
    return [found] if all(isinstance(item, int) for item in found) else found


def unwrapped(prompt: Prompt) -> str | Sequence[int]:
    """Returns the text or the token ids of a prompt; ``PromptError`` for what is neither."""
    found: Any = prompt
    if isinstance(prompt, Mapping) and set(prompt) <= {"prompt", "prompt_token_ids"}:
        found = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(found, str) or (isinstance(found, Sequence) and not isinstance(found, bytes)):
        return found
    raise PromptError(
        "a prompt is a text, a list of token ids, or a dict with one of the two as 'prompt' or "
        f"'prompt_token_ids', not {_shown(prompt)}."
    )


def _shown(prompt: object) -> str:
    return f"one with {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else repr(prompt)


def check_characters(text: str) -> None:
    """Raises ``PromptError`` for a text that is not Unicode."""
    # Half of a surrogate pair, as broken UTF-8 in a command line becomes, stops every tokenizer.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt holds a character that is not Unicode text ({text[error.start]!r} at "
            f"position {error.start}): give it as valid UTF-8."
        ) from error
