"""The texts that CTC frames spell, and how likely each is: prefix beam search.

Graves and Jaitly 2014, "Towards End-to-End Speech Recognition with Recurrent Neural Networks".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BEAMS = 24
"""Texts that are kept from frame to frame."""
TOP_K = 6
"""The likeliest tokens of a frame that are looked at, unless a user asks for another number."""

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


def beginnings(texts: dict[Text, float], count: int) -> dict[Text, float]:
    """Returns the likeliest beginnings of these texts, at most so many, each with its chance; the
    likeliest first, so that none comes before its own beginnings.

    >>> beginnings({(5, 7): 0.4, (5, 8): 0.2, (6,): 0.3, (): 0.1}, 2)
    {(5,): 0.6000000000000001, (5, 7): 0.4}
    """
    mass: defaultdict[Text, float] = defaultdict(float, texts)
    for length in range(max(map(len, texts), default=0), 0, -1):
        for text in [each for each in mass if len(each) == length]:
            mass[text[:-1]] += mass[text]
    # A beginning is never less likely than what it begins.
    chosen = sorted((text for text in mass if text), key=lambda text: (-mass[text], text))
    return {text: mass[text] for text in chosen[:count] if mass[text] > 0}


def frames_of(logits: Tensor, tokens: Tensor, top_k: int) -> list[list[Frame]]:
    """Returns the frames of each of B places: one transfer from the device.

    logits: ``[B, F, V' + 1]`` of V' tokens and, last, of a blank. tokens: ``[V']``, the target's
    numbers of these tokens. top_k: how many tokens of each frame are looked at.
    """
    chances = logits.double().softmax(-1)
    best = chances[..., :-1].topk(top_k, -1)
    listed = torch.cat([chances[..., -1:], best.values, tokens[best.indices].double()], -1)
    return [[_frame(frame, top_k) for frame in place] for place in listed.tolist()]


def _frame(listed: Sequence[float], count: int) -> Frame:
    blank, chances, tokens = listed[0], listed[1 : 1 + count], listed[1 + count :]
    return Frame(blank, [(int(token), p) for token, p in zip(tokens, chances, strict=True)])
