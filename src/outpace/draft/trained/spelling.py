"""The texts that CTC frames spell, and how likely each is: prefix beam search.

Graves and Jaitly 2014, "Towards End-to-End Speech Recognition with Recurrent Neural Networks".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outpace.draft.guesses import Guess

BEAMS = 24
"""Texts that are kept from frame to frame."""

Text = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """What a frame may be."""

    blank: float
    """How likely it is blank."""
    tokens: Sequence[tuple[int, float]]
    """Its likeliest tokens, and how likely each is."""


def spelt(frames: Iterable[Frame]) -> dict[Text, float]:
    """Returns the likeliest texts that frames spell, with the sum over all frames that spell each.

    >>> found = spelt([Frame(0.5, [(7, 0.5)]), Frame(0.5, [(7, 0.5)])])
    >>> found[()], found[7,]
    (0.25, 0.75)
    """
    # By text: how likely its frames are so far, the last of them blank, or not.
    beams: dict[Text, tuple[float, float]] = {(): (1.0, 0.0)}
    for frame in frames:
        blank: defaultdict[Text, float] = defaultdict(float)
        spoken: defaultdict[Text, float] = defaultdict(float)
        for text, (after_blank, after_token) in beams.items():
            blank[text] += (after_blank + after_token) * frame.blank
            for token, chance in frame.tokens:
                repeated = bool(text) and text[-1] == token
                if repeated:
                    spoken[text] += after_token * chance
                # A token is spoken twice only where a blank frame stands in between.
                before = after_blank if repeated else after_blank + after_token
                if before:
                    spoken[(*text, token)] += before * chance
        both = {text: (blank[text], spoken[text]) for text in {**blank, **spoken}}
        best = sorted(both, key=lambda text: (-sum(both[text]), text))[:BEAMS]
        beams = {text: both[text] for text in best}
    return {text: sum(parts) for text, parts in beams.items()}


def likeliest_tree(texts: dict[Text, float], nodes: int) -> Guess:
    """Returns the tree of so many beginnings of these texts that are likeliest."""
    mass: defaultdict[Text, float] = defaultdict(float, texts)
    for length in range(max(map(len, texts), default=0), 0, -1):
        for text in [each for each in mass if len(each) == length]:
            mass[text[:-1]] += mass[text]
    chosen = sorted((text for text in mass if text), key=lambda text: (-mass[text], text))
    number: dict[Text, int] = {(): 0}
    guess = Guess()
    for text in chosen[:nodes]:
        if mass[text] > 0:  # a beginning is never less likely than what it begins
            number[text] = guess.add(text[-1], number[text[:-1]], mass[text])
    return guess
