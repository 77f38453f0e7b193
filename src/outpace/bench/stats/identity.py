"""Whether contestants wrote the same texts, and how close the call was where they did not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.targets.base import Target

Gap = Callable[[Sequence[int], int, int], float]
"""``gap(ids, one, other)``: how far apart the target's logits of two tokens are after ``ids``."""


@dataclass(frozen=True)
class TextDifference:
    """The first token at which a text leaves the baseline's."""

    prompt: str
    position: int
    expected: int
    found: int
    gap: float | None
    """Logit of the expected token minus that of the other, in standard deviations of all logits.
    Near 0 the tokens are almost tied, and rounding may have decided."""


@dataclass(frozen=True)
class Identity:
    """How many texts agree with the baseline's, token for token."""

    compared: int
    identical: int
    differences: tuple[TextDifference, ...] = ()

    @property
    def explained(self) -> bool:
        """True where every difference is a near-tie."""
        return all(d.gap is not None and abs(d.gap) < NEAR for d in self.differences)


NEAR = 0.02
"""Largest gap, in standard deviations of the logits, that rounding can close (in bfloat16, which
keeps 8 bits)."""


def compare(
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    gap: Gap | None = None,
) -> Identity:
    """Returns where each found text leaves the expected one."""
    differences = []
    for name, prompt, ours, theirs in zip(names, prompts, expected, found, strict=True):
        at = first_difference(ours, theirs)
        if at is None:
            continue
        one = ours[at] if at < len(ours) else -1
        other = theirs[at] if at < len(theirs) else -1
        known = gap is not None and one >= 0 and other >= 0
        size = gap([*prompt, *ours[:at]], one, other) if known and gap is not None else None
        differences.append(TextDifference(name, at, one, other, size))
    return Identity(len(expected), len(expected) - len(differences), tuple(differences))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first position at which two texts differ, None if they are equal.

    >>> first_difference([1, 2, 3], [1, 2]), first_difference([1], [1])
    (2, None)
    """
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def gap_of(target: Target) -> Gap:
    """Returns a function for the gaps of this target, which reads each text plainly."""

    def gap(ids: Sequence[int], one: int, other: int) -> float:
        logits = target.plain(ids)[-1].double()
        return float((logits[one] - logits[other]) / logits.std())

    return gap
