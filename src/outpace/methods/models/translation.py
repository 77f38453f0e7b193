"""A text from one tokenizer's tokens into another's, as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.core.clean_up import cleaner_of
from outpace.core.detokenizer import UNFINISHED, Detokenizer
from outpace.methods.models.draft_text import DraftText

TAIL = 128
"""Characters at the end of a text that are tokenised anew each time, at least: a new character
changes how those before it are cut into tokens, but not far back."""

LONGEST = 512
"""From this length on a part of the tail is settled."""

ANCHORS = ("\n", ".", "a")
"""What a continuation is tokenised after, one after the other until the anchor's own tokens come
out first: at the beginning of a text, tokenizers add spaces or tokens of their own."""


class RetokenizedText(DraftText):
    """One text in the drafter's tokens, from the target's.

    Text is cut into tokens anew where it grows, so that the drafter reads what its own tokenizer
    would have made of the whole, and not the target's way of cutting words. Further back tokens are
    settled, so that a step takes the same time however long the text is.
    """

    def __init__(self, target: Any, own: Any, goes_on: bool = False) -> None:
        """target, own: the tokenizers. goes_on: whether it stands after another text."""
        self._goes_on = goes_on
        self._detokenizer = Detokenizer(target, clean=cleaner_of(target))
        self._own = own
        self._read = 0  # tokens of the target
        self._settled: list[int] = []  # own tokens, of the text up to here:
        self._upto = 0

    @property
    def read(self) -> int:
        return self._read

    @property
    def unfinished(self) -> bool:
        # In the middle of a character.
        return self._detokenizer.unfinished

    def extend(self, tokens: Sequence[int]) -> list[int]:
        if tokens:
            self._detokenizer.extend(tokens)
            self._read += len(tokens)
        text = self._detokenizer.text
        if len(text) - self._upto > LONGEST:
            self._settle(text)
        return [*self._settled, *self._tokens(text[self._upto :])]

    def _settle(self, text: str) -> None:
        """Settles the tail but for its last words."""
        end = text.rfind(" ", self._upto + 1, len(text) - TAIL)
        # Tokenizers cut before the last of several spaces in one way only if a word precedes it.
        while end > self._upto and text[end - 1].isspace():
            end = text.rfind(" ", self._upto + 1, end)
        if end > self._upto:
            self._settled += self._tokens(text[self._upto : end])
            self._upto = end

    def _tokens(self, text: str) -> list[int]:
        inside = self._goes_on or self._upto > 0
        return continuation(self._own, text) if inside else beginning(self._own, text)


def beginning(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text from its beginning, with those that come before any text (BOS),
    and without any that end it."""
    ids = list(tokenizer(text).input_ids)
    ends = getattr(tokenizer, "eos_token_id", None)
    start = getattr(tokenizer, "bos_token_id", None)
    while len(ids) > 1 and ids[-1] == ends != start:
        ids.pop()
    return ids


def continuation(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text that goes on after another."""
    if not text:
        return []
    for anchor in ANCHORS:
        before = _plainly(tokenizer, anchor)
        ids = _plainly(tokenizer, anchor + text)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return _plainly(tokenizer, text)


def _plainly(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def spoken(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the whole characters that tokens add to a text that ends in the tokens ``before``."""
    known = tokenizer.decode(list(before), skip_special_tokens=True)
    text: str = tokenizer.decode([*before, *tokens], skip_special_tokens=True)
    return text[len(known) :].rstrip(UNFINISHED)


def common_prefix_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens two texts begin with alike.

    >>> common_prefix_len([5, 6, 7], [5, 6, 8, 9])
    2
    """
    for at, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return at
    return min(len(one), len(other))
