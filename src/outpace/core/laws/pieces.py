"""Work over large vocabularies in pieces, so that what is held in between stays small."""

from __future__ import annotations

from collections.abc import Iterator

LARGEST = 1 << 19
"""Numbers of an intermediate result, at most, unless a single row of it is longer.

Large results cost twice: the operating system hands out their memory anew each time, and they no
longer fit into a processor's cache.
"""


def pieces(count: int, width: int) -> Iterator[slice]:
    """Yields slices that together cover ``range(count)``, each of at most `LARGEST` numbers.

    width: how many numbers belong to each of the ``count`` items. A piece has at least one item.

    >>> list(pieces(3, LARGEST // 2))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    size = max(1, LARGEST // max(1, width))
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))
