"""Traces of the texts that are being written: windows of tokens to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.train.teacher import TOP, TeacherBatch


@dataclass(frozen=True, eq=False)
class Window:
    """A stretch of one text, with the target's distributions where something is to be learned."""

    tokens: Sequence[int]
    states: Sequence[Tensor]  # [H] each, or none at all
    top_tokens: dict[int, Tensor]  # [TOP] each, by place
    top_chances: dict[int, Tensor]  # [TOP] each


class Trace:
    """The latest tokens of one text."""

    def __init__(self, size: int) -> None:
        """size: tokens of a window."""
        self._size = size
        self._tokens: list[int] = []
        self._states: list[Tensor] = []
        self._top: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompt = True  # until there is something to learn

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, tokens: Sequence[int], states: Tensor | None) -> None:
        """Takes the tokens that come next and, if there are any, their states ``[T, H]``. Of a long
        prompt only the end is kept."""
        if self._prompt:
            tokens = tokens[-self._size :]
        self._tokens += tokens
        if states is not None:
            # A copy: as long as any part of a chunk is kept, all of it is.
            self._states += states[len(states) - len(tokens) :].clone().unbind(0)
        if self._prompt:
            self._keep(self._size // 2)

    def note(self, back: int, top_tokens: Tensor, top_chances: Tensor) -> None:
        """Takes the distribution after a token, counted from the end: 1 is the last."""
        self._prompt = False
        if back <= len(self._tokens):  # else the token is no longer kept
            self._top[len(self._tokens) - back] = (top_tokens, top_chances)

    def cut(self, ended: bool) -> list[Window]:
        """Returns the windows that are full, or at the end of the text what there is. The second
        half of a window is the beginning of the next one, where it is not learned from again."""
        found = []
        while len(self._tokens) >= self._size or (ended and self._top):
            size = min(self._size, len(self._tokens))
            own = {at: top for at, top in self._top.items() if at < size}
            if own:
                found.append(
                    Window(
                        self._tokens[:size],
                        self._states[:size],
                        {at: top[0] for at, top in own.items()},
                        {at: top[1] for at, top in own.items()},
                    )
                )
            self._top = {at: top for at, top in self._top.items() if at >= size}
            self._keep(len(self._tokens) - (size - self._size // 2 if not ended else size))
        return found

    def _keep(self, count: int) -> None:
        """Keeps the last n tokens."""
        gone = len(self._tokens) - count
        if gone > 0:
            del self._tokens[:gone], self._states[:gone]
            self._top = {at - gone: top for at, top in self._top.items() if at >= gone}


def batch_of(windows: Sequence[Window], size: int, device: torch.device) -> TeacherBatch:
    """Returns windows as one batch of texts of ``size`` tokens. After a shorter one stands what
    nothing is learned from."""
    shape = (len(windows), size)
    tokens = torch.zeros(shape, dtype=torch.long)
    top = min(
        TOP,
        max(len(distribution) for window in windows for distribution in window.top_tokens.values()),
    )
    top_tokens = torch.zeros(*shape, top, dtype=torch.long, device=device)
    top_chances = torch.zeros(*shape, top, device=device)
    width = len(windows[0].states[0]) if windows[0].states else 0
    states = torch.zeros(*shape, width, device=device)
    for row, window in enumerate(windows):
        count = len(window.tokens)
        tokens[row, :count] = torch.tensor(window.tokens)
        if width:
            states[row, :count] = torch.stack(list(window.states)).to(states)
        for at, distribution in window.top_tokens.items():
            top_tokens[row, at] = distribution
            top_chances[row, at] = window.top_chances[at].to(top_chances)
    return TeacherBatch(tokens.to(device), states, top_tokens, top_chances)
