"""Checks of texts for lone surrogates, which broken UTF-8 in a command line becomes, and which no
tokenizer takes."""

from __future__ import annotations

from collections.abc import Callable

from outpace.errors import PromptError


def is_unicode(text: str) -> bool:
    """Returns whether a text can be written as UTF-8.

    >>> is_unicode("\\U0001f600"), is_unicode("\\ud83d")
    (True, False)
    """
    return _lone_surrogate(text) is None


def check_unicode(name: str, text: str, *, error: Callable[[str], Exception] = PromptError) -> None:
    """Raises ``error`` for a text that is not Unicode; name: how the sentence calls the text."""
    place = _lone_surrogate(text)
    if place is not None:
        raise error(
            f"{name} holds a character that is not Unicode text ({text[place]!r} at position "
            f"{place}): give it as valid UTF-8."
        )


def _lone_surrogate(text: str) -> int | None:
    """The place of the first half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
