"""A back-off n-gram table of a few MB: the likeliest successors of contexts of a few tokens.

Chances are those of interpolated absolute discounting (Chen and Goodman 1999, "An empirical study
of smoothing techniques for language modeling"). They are counted in texts and not in places,
because a text repeats itself for reasons of its own. Entries that say little more than a shorter
context does are left out first, as in Stolcke 1998, "Entropy-based pruning of backoff language
models".
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTH = 4
"""Tokens of the longest context."""
SUCCESSORS = 4
"""Successors of a context of one token, which trees are made of; a longer context has one."""
ENTRIES = 500_000
"""Entries that are kept: some 4 bytes each in a file, and 9 in memory."""
LEVELS = 32
"""Steps in which chances are kept."""
DISCOUNT = 0.75
"""What each count is lowered by, in favour of what the shorter context says."""
WIDTH = 9
"""Bytes of an entry: its context, its token, its chance."""

_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Array = NDArray[Any]


class NgramTable:
    """The likeliest successors of contexts of one token to `DEPTH`.

    A context is kept as a hash of 32 bits. With 500,000 entries, one in ten thousand contexts that
    are not there is taken for another one, which costs a wrong draft.
    """

    def __init__(self, keys: Array, tokens: Array, levels: Array) -> None:
        """keys: ``[n]`` uint32, ascending; equal ones are of one context, the likeliest successor
        first. tokens: ``[n]`` uint32, the successors. levels: ``[n]`` uint8, their chances."""
        self._arrays = keys, tokens, levels
        # A memory view gives Python's own numbers, several times as fast as an array its own.
        views: Any = [each.data for each in self._arrays]
        self._keys, self._tokens, self._levels = views

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._keys)

    def after(self, context: Sequence[int]) -> tuple[int, float] | None:
        """Returns the likeliest successor of the longest known end of a context, and its chance;
        None where no end is known. Takes some microseconds."""
        hashes, value = [], 0
        for token in reversed(context[-DEPTH:]):
            value = (value + token + 1) * _FACTOR & _MASK
            hashes.append(value >> 32)
        for key in reversed(hashes):
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                return self._tokens[at], (self._levels[at] + 0.5) / LEVELS
        return None

    def successors(self, vocabulary: int, most: int) -> Array:
        """Returns the ``most`` likeliest successors of each single token, ``[V, most]`` int32, with
        -1 where fewer are known."""
        keys, tokens, _ = self._arrays
        found = np.full((vocabulary, most), -1, np.int32)
        wanted = _keys_of(np.arange(vocabulary))
        begins = np.searchsorted(keys, wanted)
        counts = np.searchsorted(keys, wanted, "right") - begins
        for rank in range(min(most, SUCCESSORS)):
            known = counts > rank
            found[known, rank] = tokens[begins[known] + rank]
        return found

    @property
    def largest(self) -> int:
        """The largest token that is a successor; -1 without entries."""
        return int(self._arrays[1].max(initial=0)) if len(self) else -1

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in self._arrays)

    # -- making --------------------------------------------------------------------------------

    @classmethod
    def of(cls, tokens: Array, most: int = ENTRIES) -> NgramTable:
        """Returns the table of some texts: the ``most`` entries that bring most.

        tokens: ``[n]`` int64, with a negative number after each text. A context has to stand in two
        texts.
        """
        return cls._best(_counted(tokens), most)

    @classmethod
    def of_successors(cls, successors: Array) -> NgramTable:
        """Returns the table of successors ``[V, k]``, the likeliest first and -1 where there is
        none. Of their chances only the order is known."""
        count, most = successors.shape[0], min(successors.shape[1], SUCCESSORS)
        tokens = successors[:, :most].flatten()
        chances = np.tile(0.5 ** np.arange(1, most + 1), count)
        known = tokens >= 0
        keys = np.repeat(_keys_of(np.arange(count)), most)
        return cls._best([_Entries(keys[known], tokens[known], chances[known], chances[known])])

    def with_more(self, other: NgramTable) -> NgramTable:
        """Returns this table with the contexts that only the other one knows: as many of them as
        fit, whichever."""
        keys, tokens, levels = other._arrays
        new = ~np.isin(keys, self._arrays[0])
        parts = zip(self._arrays, (keys[new], tokens[new], levels[new]), strict=True)
        all_keys, all_tokens, all_levels = map(np.concatenate, parts)
        order = np.argsort(all_keys[:ENTRIES], kind="stable")
        return NgramTable(all_keys[order], all_tokens[order], all_levels[order])

    @classmethod
    def _best(
        cls, found: Sequence[_Entries] | Iterator[_Entries], most: int = ENTRIES
    ) -> NgramTable:
        parts = [_Entries(*(np.empty(0, np.uint32) for _ in range(4))), *found]
        names = _Entries.__annotations__
        keys, tokens, chances, gains = (
            np.concatenate([getattr(part, name) for part in parts]) for name in names
        )
        best = np.argsort(-gains, kind="stable")[:most]
        order = best[np.lexsort((-chances[best], keys[best]))]
        levels = np.minimum(chances[order] * LEVELS, LEVELS - 1)
        return cls(
            keys[order].astype(np.uint32), tokens[order].astype(np.uint32), levels.astype(np.uint8)
        )

    # -- keeping -------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Returns what a file holds: contexts as the distance to the one before, tokens and
        chances, byte by byte of each number, compressed."""
        keys, tokens, levels = self._arrays
        planes = [np.diff(keys, prepend=np.uint32(0)), tokens]
        raw = b"".join(_planes(each).tobytes() for each in planes) + levels.tobytes()
        return zlib.compress(raw, 9)

    @classmethod
    def from_bytes(cls, data: bytes, entries: int) -> NgramTable:
        """Returns the table of a file with this many entries; ``ValueError`` where it has others,
        or is cut short or otherwise damaged."""
        opened = zlib.decompressobj()
        try:
            raw = opened.decompress(data, WIDTH * entries + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if len(raw) != WIDTH * entries or not opened.eof:
            raise ValueError("another number of entries")
        numbers = np.frombuffer(raw[: 8 * entries], np.uint8).reshape(2, 4, entries)
        steps, tokens = (_whole(planes) for planes in numbers)
        keys = np.cumsum(steps, dtype=np.uint64)
        if entries and keys[-1] > np.iinfo(np.uint32).max:
            raise ValueError("contexts beyond the last one")
        levels = np.frombuffer(raw[8 * entries :], np.uint8)
        if levels.max(initial=0) >= LEVELS:
            raise ValueError("chances above 1")
        return cls(keys.astype(np.uint32), tokens, levels)


def _planes(numbers: Array) -> Array:
    """``[4, n]``: the bytes of 32-bit numbers, the lowest first."""
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4).T


def _whole(planes: Array) -> Array:
    return np.ascontiguousarray(planes.T).view("<u4")[:, 0].astype(np.uint32)


def _keys_of(tokens: Array) -> Array:
    """The keys of contexts of one token."""
    value = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_FACTOR)
    return (value >> np.uint64(32)).astype(np.uint32)


# -- counting --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Entries:
    keys: Array  # [n]
    tokens: Array  # [n]
    chances: Array  # [n]
    gains: Array  # [n] tokens that are drafted rightly for it, in the texts themselves


def _counted(tokens: Array) -> Iterator[_Entries]:
    """Yields the entries of each length of a context. What is known of a place stands at its
    number: that of the token that comes next there."""
    count = len(tokens)
    text: Array = np.cumsum(tokens < 0) - (tokens < 0)  # [n] the number of its text
    value = np.zeros(count, np.uint64)
    inside = tokens >= 0
    lower = np.zeros(count, np.float32)  # what shorter contexts give the token
    best = np.full(count, -1, np.int64)  # what they hold likeliest
    chance = np.zeros(count, np.float32)  # and its chance
    for size in range(1, DEPTH + 1):
        before = np.full(count, -1, np.int64)
        before[size:] = tokens[:-size]
        inside &= before >= 0
        value = (value + (before + 1).astype(np.uint64)) * np.uint64(_FACTOR)
        places = inside.nonzero()[0]
        places = places[np.argsort(value[places], kind="stable")]
        contexts = _begins(value[places])
        several = _texts_in(text[places], contexts) > 1
        places = places[np.repeat(several, _sizes(contexts, places))]
        if not len(places):
            return
        # Sorted by context, in it by the next token, and there by text.
        places = places[np.lexsort((tokens[places], value[places]))]
        contexts, pairs = _begins(value[places]), _begins(value[places], tokens[places])
        first = np.searchsorted(pairs, contexts)  # the first pair of each context
        kinds = _sizes(first, pairs)
        context_of = np.repeat(np.arange(len(contexts)), kinds)
        counts = _texts_in(text[places], pairs)
        total = np.add.reduceat(counts, first)
        given = places[pairs]
        share = np.maximum(counts - DISCOUNT, 0) + DISCOUNT * kinds[context_of] * lower[given]
        share = (share / total[context_of]).astype(np.float32)
        ranked = np.lexsort((-share, context_of))
        top = ranked[first]
        same = tokens[given] == best[given]
        before_it = np.maximum.reduceat(np.where(same, share, 0), first)
        surer = np.abs(share[top] - chance[given[top]]) / 2
        gain = np.where(same[top], surer, share[top] - before_it)
        yield _entries(value, tokens, given[top], share[top], total * gain)
        if size == 1:
            rank = np.arange(len(pairs)) - first[context_of]
            younger = ranked[(rank > 0) & (rank < SUCCESSORS)]
            yield _entries(value, tokens, given[younger], share[younger], counts[younger])
        lower[places] = np.repeat(share, _sizes(pairs, places))
        best[places] = np.repeat(tokens[given[top]], _sizes(contexts, places))
        chance[places] = np.repeat(share[top], _sizes(contexts, places))


def _entries(value: Array, tokens: Array, places: Array, chances: Array, gains: Array) -> _Entries:
    keys = (value[places] >> np.uint64(32)).astype(np.uint32)
    return _Entries(keys, tokens[places], chances, gains.astype(np.float32))


def _begins(*keys: Array) -> Array:
    """Where in sorted keys another one begins."""
    new = np.zeros(len(keys[0]), bool)
    new[:1] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    return new.nonzero()[0]


def _sizes(begins: Array, whole: Array) -> Array:
    """How many entries of the whole each part has."""
    return np.diff(begins, append=len(whole))


def _texts_in(text: Array, begins: Array) -> Array:
    """How many different texts each part has, in which they ascend."""
    new = np.ones(len(text), np.int64)
    new[1:] = text[1:] != text[:-1]
    new[begins] = 1
    return np.add.reduceat(new, begins) if len(begins) else new
