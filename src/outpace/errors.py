"""Every error that a user can cause.

    OutpaceError
    ├── ConfigError            (ValueError)  a bad engine or speculative_config option
    │   ├── UnknownArgument    (TypeError)   a name that LLM does not know
    │   ├── VocabularyMismatch               drafter and target do not share a tokenizer
    │   └── IncompatibleRule                 the rule cannot verify what the drafter proposes
    ├── ParamsError            (ValueError)  a bad sampling option
    │   └── UnknownOption      (TypeError)   a name that SamplingParams does not know
    ├── PromptError            (ValueError)  an empty or unreadable prompt
    │   └── PromptTooLong                    a prompt that leaves no room for a text
    ├── ModelLoadError         (ValueError)  no model where one was named
    ├── UnsupportedModel       (ValueError)  a model that cannot be decoded speculatively
    └── ProcessLost                          a process that holds a part of the model is gone

Each message is one sentence that names the cause and the remedy.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Self, TypeVar


class OutpaceError(Exception):
    """Base of all errors that a user can cause."""

    option: str | None = None
    """The option of a request that it is about; None where that is not one option, or nobody has
    said so."""

    def about(self, option: str) -> Self:
        """Returns the error with the option that it is about."""
        self.option = option
        return self


class ConfigError(OutpaceError, ValueError):
    """A bad engine option or ``speculative_config`` entry."""


class UnknownArgument(ConfigError, TypeError):
    """A name that ``LLM`` or ``SpeculativeConfig`` does not know; as Python would raise a
    ``TypeError``, this is one too."""


class VocabularyMismatch(ConfigError):
    """Drafter and target do not share a tokenizer."""


class IncompatibleRule(ConfigError):
    """The verification rule cannot handle the distribution or the shape that the drafter
    proposes."""


class ParamsError(OutpaceError, ValueError):
    """A bad sampling option."""


class UnknownOption(ParamsError, TypeError):
    """A name that ``SamplingParams`` does not know; as Python would raise a ``TypeError``, this is
    one too."""


class PromptError(OutpaceError, ValueError):
    """An empty or unreadable prompt."""


class PromptTooLong(PromptError):
    """A prompt that is longer than the model or its engine can read."""


class ModelLoadError(OutpaceError, ValueError):
    """No loadable model where one was named."""


class UnsupportedModel(OutpaceError, ValueError):
    """A model whose cache cannot roll back or whose attention cannot take a mask."""


class ProcessLost(OutpaceError):
    """A process that holds a part of the model has ended, or does not answer."""


_MOST_SHOWN = 64
"""Names that a sentence lists, at most."""


def did_you_mean(word: object, known: Iterable[str], near: float = 0.6) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest known word, else the known words; of very
    many the closest ones.

    ``word`` may be anything that a caller gave in the place of a word. near: how much alike two
    words have to be, by difflib's ratio.

    >>> did_you_mean("nagram", ["ngram", "none"])
    " (did you mean 'ngram'?)"
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=near)
    if close:
        return f" (did you mean {close[0]!r}?)"
    if len(names) > _MOST_SHOWN:
        some = difflib.get_close_matches(str(word), names, n=5, cutoff=0)
        return f" (choose from {len(names)}, such as {', '.join(sorted(some))})"
    return f" (choose from {', '.join(names)})"


_LONGEST_REASON = 300


def reason_of(error: BaseException, *, lines: int = 1, named: bool = False) -> str:
    """Returns the first line of what an error says, cut, and the second after a colon; its class's
    name where it says nothing.

    lines: how many are put into one, for errors whose first line says only what the others are
    about. named: whether the class's name comes first, which the text of a ``KeyError``, for
    example, says nothing without.

    >>> reason_of(OSError("no such file\\nand more")), reason_of(KeyError("a"), named=True)
    ('no such file', "KeyError: 'a'")
    >>> reason_of(ValueError("the entry 'a' is wrong:\\n    it is a text\\nand more"))
    "the entry 'a' is wrong: it is a text"
    """
    first, *rest = (line.strip() for line in str(error).strip().split("\n"))
    said = " ".join([first, *rest[: max(lines - 1, first.endswith(":"))]])
    name = type(error).__name__
    if not said:
        return name
    return f"{name}: {said[:_LONGEST_REASON]}" if named else said[:_LONGEST_REASON]


_OWN_ERROR = re.compile(rf"\b{__name__}\.(\w+): (.+)")
_ANOTHER_ERROR = re.compile(r"^During handling of", re.MULTILINE)


def error_of_stack(stack: str) -> OutpaceError | None:
    """Returns the error of this library that the stack of another process ends with, or that was
    the cause of the last one; None for others."""
    found = list(_OWN_ERROR.finditer(stack))
    if not found or _ANOTHER_ERROR.search(stack, found[-1].end()):
        return None
    kind = globals().get(found[-1][1])
    if not isinstance(kind, type) or not issubclass(kind, OutpaceError):
        return None
    return kind(found[-1][2].strip())


Class = TypeVar("Class", bound=type)


def names_checked(error: type[OutpaceError], what: str) -> Callable[[Class], Class]:
    """Returns a class decorator: unknown keyword arguments of ``__init__`` raise ``error``.

    The sentence names the closest known argument, which Python's own ``TypeError`` does not.
    ``what``: how the sentence calls an argument. Signature and types stay as they are.
    """

    def checked(cls: Class) -> Class:
        init: Callable[..., None] = cls.__init__  # type: ignore[misc]
        known = [name for name in inspect.signature(init).parameters if name != "self"]

        @wraps(init)
        def with_names_checked(self: object, *args: Any, **named: Any) -> None:
            for name in named:
                if name not in known:
                    raise error(f"unknown {what} {name!r}{did_you_mean(name, known)}.")
            init(self, *args, **named)

        cls.__init__ = with_names_checked  # type: ignore[misc]
        return cls

    return checked


def refuse(what: str, reasons: Mapping[str, str | bool]) -> None:
    """Raises ``ConfigError`` for the first option that does not go with something.

    reasons: by option, why it does not; False where it is not asked for.
    """
    for name, reason in reasons.items():
        if reason:
            raise ConfigError(
                f"{name} does not go with {what}, since {reason}: leave one of the two out."
            )
