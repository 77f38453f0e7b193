"""Faults of one row of a batch, which end that row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outpace.errors import ParamsError


class RowFault(ParamsError):
    """Base of the errors that belong to one row: its request ends with them, and no other."""

    def __init__(self, row: int, message: str) -> None:
        """row: its number in the batch."""
        super().__init__(message)
        self.row = row


class Contradiction(RowFault):
    """One row's options leave it no token to go on with."""

    def __init__(self, row: int) -> None:
        super().__init__(
            row,
            "allowed_token_ids, bad_words, min_tokens, logits_processors and the grammar, as far "
            "as they are given, together forbid every token: relax one of them.",
        )


class NotFinite(RowFault):
    """One row has scores that are not numbers, or infinitely large, so that they are no
    distribution."""


class ModelFault(NotFinite):
    """The model's own scores are not numbers, or those of its drafter: no option is to blame."""


class MaskFault(RowFault):
    """One row's mask could not say what may come next: its grammar is too complex."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(row, f"the grammar cannot be followed further ({error}): simplify it.")


class ProcessorFault(RowFault):
    """One of a row's logits processors raised an exception, or returned what no scores are.

    An exception that was raised is the ``__cause__``.
    """

    @classmethod
    def raised(cls, row: int, processor: Callable[..., Any], error: Exception) -> ProcessorFault:
        """Returns the fault of a processor that raised ``error``."""
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fault = cls(
            row,
            f"the logits processor {name_of(processor)!r} raised {words}; correct it, or leave it "
            "out of logits_processors.",
        )
        fault.__cause__ = error
        return fault

    @classmethod
    def returned(
        cls, row: int, processor: Callable[..., Any], what: str, wanted: str
    ) -> ProcessorFault:
        """Returns the fault of a processor that returned ``what`` and not what is ``wanted``."""
        return cls(
            row, f"the logits processor {name_of(processor)!r} returned {what}; it must {wanted}."
        )


def name_of(called: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of an object that is called like one."""
    return str(getattr(called, "__name__", type(called).__name__))
