"""Every error that a user can cause.

    OutpaceError
    ├── ConfigError            (ValueError)  a bad engine or speculative_config option
    │   ├── VocabularyMismatch               drafter and target do not share a tokenizer
    │   └── IncompatibleRule                 the rule cannot verify what the drafter proposes
    ├── ParamsError            (ValueError)  a bad sampling option
    ├── PromptError            (ValueError)  an empty, too long or unreadable prompt
    ├── ModelLoadError         (ValueError)  no model where one was named
    └── UnsupportedModel       (ValueError)  a model that cannot be decoded speculatively

Each message is one sentence that names the cause and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutpaceError(Exception):
    """Base of all errors that a user can cause."""


class ConfigError(OutpaceError, ValueError):
    """A bad engine option or ``speculative_config`` entry."""


class VocabularyMismatch(ConfigError):
    """Drafter and target do not share a tokenizer."""


class IncompatibleRule(ConfigError):
    """The verification rule cannot handle the law or the shape that the drafter proposes."""


class ParamsError(OutpaceError, ValueError):
    """A bad sampling option."""


class PromptError(OutpaceError, ValueError):
    """An empty, too long or unreadable prompt."""


class ModelLoadError(OutpaceError, ValueError):
    """No loadable model where one was named."""


class UnsupportedModel(OutpaceError, ValueError):
    """A model whose cache cannot roll back or whose attention cannot take a mask."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest known word, else the known words.

    >>> did_you_mean("nagram", ["ngram", "none"])
    " (did you mean 'ngram'?)"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
    return f" ({hint})"
