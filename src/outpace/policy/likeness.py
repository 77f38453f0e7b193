"""Which earlier texts a text is like."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outpace.core.request import Request

KEPT = 64
"""Texts with which a new one is compared: the latest."""

ENDS = 512
"""Tokens at the beginning of a prompt, and at its end, that are compared."""

BINS = 4096
"""Tokens are compared by their numbers modulo this. So few of the bins are in a prompt that others
seldom fall into the same ones."""


@dataclass(eq=False, frozen=True)
class Text:
    """A text that others are compared with. What is learned of it is kept elsewhere, under it."""

    bins: Tensor
    """Which tokens are in its prompt, ``[BINS]`` bool."""

    def to_save(self) -> list[int]:
        """Returns its bins as numbers, for a later run."""
        return [int(at) for at in self.bins.nonzero().flatten()]

    @classmethod
    def restored(cls, saved: Sequence[int]) -> Self:
        """Returns what an earlier run saved."""
        return cls(_binned(saved))


@dataclass(frozen=True)
class Alike:
    """An earlier text."""

    text: Text
    share: float
    """How much a text is like it: 0 not at all, 1 if all of their tokens are the same."""


class Likeness:
    """Compares the prompts of texts.

    How soon a text ends, and how well it can be drafted, is best foretold from earlier texts of its
    kind: translations among translations, questions among questions. Prompts of one kind share
    words. So two prompts are as much alike as the cosine between them says, where each token counts
    with the logarithm of how rare it is among all that are kept (the "inverse document frequency"
    of Spärck Jones, 1972): from those that a chat template puts around every message next to
    nothing follows. Tokens that only one prompt has do not count, since they say nothing about
    which of the others are alike.
    """

    def __init__(self) -> None:
        self._kept: deque[Text] = deque(maxlen=KEPT)
        self._of: WeakKeyDictionary[Request, tuple[Text, Sequence[Alike]]]
        self._of = WeakKeyDictionary()

    @property
    def kept(self) -> Sequence[Text]:
        """The texts with which a new one is compared."""
        return self._kept

    def keep(self, text: Text) -> None:
        """Adds a text of an earlier run."""
        self._kept.append(text)

    def text(self, request: Request) -> Text:
        """Returns what stands for a request's text, which is kept from now on."""
        return self._entry(request)[0]

    def alike(self, request: Request) -> Sequence[Alike]:
        """Returns the earlier texts that have anything in common with a request's prompt."""
        return self._entry(request)[1]

    def _entry(self, request: Request) -> tuple[Text, Sequence[Alike]]:
        entry = self._of.get(request)
        if entry is None:
            text = Text(_bins(request.prompt_ids))
            entry = self._of[request] = text, self._compare(text)
            self._kept.append(text)
        return entry

    def _compare(self, text: Text) -> list[Alike]:
        if not self._kept:
            return []
        earlier = torch.stack([each.bins for each in self._kept]).float()  # [N, BINS]
        new = text.bins.float()
        texts_with = earlier.sum(0) + new
        rarity = ((len(self._kept) + 2) / texts_with.clamp(min=1)).log() * (texts_with > 1)
        common = earlier @ (rarity * new)  # [N]
        shares = common / ((earlier @ rarity) * (rarity @ new)).clamp(min=1e-9).sqrt()
        pairs = zip(self._kept, shares.tolist(), strict=True)
        return [Alike(each, share) for each, share in pairs if share > 0]


def _bins(prompt: Sequence[int]) -> Tensor:
    """The bins of a prompt's tokens."""
    return _binned([*prompt[:ENDS], *prompt[max(ENDS, len(prompt) - ENDS) :]])


def _binned(tokens: Sequence[int]) -> Tensor:
    bins = torch.zeros(BINS, dtype=torch.bool)
    bins[torch.tensor(tokens, dtype=torch.long) % BINS] = True
    return bins
