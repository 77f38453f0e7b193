"""What a head's prefix layer makes of texts that grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outpace.heads.layers import DecoderLayer
from outpace.methods.heads.text_cache import TextCache

WAITING = 32
"""States of a row that wait until they are asked for, at most: more are computed as they come."""


class PrefixTexts:
    """The texts of some rows, numbered from 0, as a prefix layer has read them.

    States that come with a round wait for the next draft of the head: another drafter may have the
    next rounds, and one pass over several states reads the layer's weights once.
    """

    def __init__(self, layer: DecoderLayer, rows: int) -> None:
        """rows: how many there may be."""
        self._layer, self._cache = layer, TextCache(layer, rows)
        self._waiting: list[list[Tensor]] = []  # of each row, [T, H] each

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return self._cache.nbytes

    def admit(self, source: int | None, known: int) -> None:
        """Adds a row: an empty one, or the first ``known`` states of a present one."""
        self._cache.admit(source, known if source is not None else 0)
        self._waiting.append([])

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, numbered anew."""
        self._cache.retain(rows)
        self._waiting = [self._waiting[row] for row in rows]

    def add(self, row: int, states: Tensor) -> None:
        """Takes the states ``[T, H]`` that come next in a row."""
        if len(states):
            self._waiting[row].append(states.clone())  # a view would keep those of the whole pass

    def waiting(self, row: int) -> int:
        """Returns how many states of a row wait."""
        return sum(map(len, self._waiting[row]))

    @torch.inference_mode()
    def latest(self, rows: Sequence[int]) -> Tensor:
        """Reads what waits in some rows, something in each; returns what the layer makes of the
        last state of each, ``[B, H]``."""
        states = [torch.cat(self._waiting[row]) for row in rows]
        counts = [len(each) for each in states]
        sight = self._cache.next_of(rows, max(counts))
        found, entries = self._layer(pad_sequence(states, batch_first=True), sight)
        self._cache.append(rows, entries, counts)
        for row in rows:
            self._waiting[row].clear()
        return torch.stack([each[count - 1] for each, count in zip(found, counts, strict=True)])
