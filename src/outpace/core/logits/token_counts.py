"""Token counts of texts that grow, updated incrementally: every token is counted once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.transfer import to_device


class TokenCounts:
    """Counts the tokens of B rows, and goes on where it stopped as long as a row only grows.

    A row is counted from its beginning if it has got another text, or a shorter one.

    >>> tally = TokenCounts(rows=1, vocabulary=3)
    >>> text = [2, 0, 2]
    >>> tally([text]).tolist()
    [[1.0, 0.0, 2.0]]
    >>> text.append(1)
    >>> tally([text]).tolist()
    [[1.0, 1.0, 2.0]]
    >>> tally.occurring.tolist()
    [[2, 0, 1]]
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str = "cpu") -> None:
        self._table = torch.zeros(rows, vocabulary, device=device)
        self._different: list[dict[int, None]] = [{} for _ in range(rows)]
        """The tokens of each row, in the order in which they first occur."""
        self._listed = torch.zeros(rows, 0, dtype=torch.long, device=device)
        """The same ``[B, U]``, 0 after the end of a row, with room for those to come."""
        self._texts: list[Sequence[int] | None] = [None] * rows
        self._last: list[tuple[int, int]] = [(0, -1)] * rows  # counted, and the last token of them

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns the counts ``[B, V]`` of each row's text, valid until the next call.

        Tokens beyond the vocabulary are not counted.
        """
        where: list[tuple[int, int]] = []
        first: list[tuple[int, int, int]] = []  # row, place in its list, token
        for row, text in enumerate(texts):
            begin = self._continues(row, text)
            new = [token for token in text[begin:] if token < self._table.shape[1]]
            where += [(row, token) for token in new]
            first += self._list(row, new)
            self._texts[row] = text
            self._last[row] = (len(text), text[-1] if text else -1)
        if where:
            row_of, token_of = to_device(where, self._table.device).unbind(1)
            one = self._table.new_ones(())
            self._table.index_put_((row_of, token_of), one, accumulate=True)
        if first:
            self._make_room()
            row_of, place, token_of = to_device(first, self._table.device).unbind(1)
            self._listed.index_put_((row_of, place), token_of)
        return self._table

    @property
    def occurring(self) -> Tensor:
        """The different tokens of each row's text, ``[B, U]``, valid until the next call. Token 0
        fills the rows that have fewer, whether it occurs there or not."""
        return self._listed[:, : max(map(len, self._different), default=0)]

    def _list(self, row: int, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns the row, the place in its list and the token, of each token that is new there."""
        different, found = self._different[row], []
        for token in tokens:
            if token not in different:
                found.append((row, len(different), token))
                different[token] = None
        return found

    def _make_room(self) -> None:
        longest = max(map(len, self._different))
        if longest > self._listed.shape[1]:
            wider = self._listed.new_zeros(len(self._listed), 2 * longest)
            wider[:, : self._listed.shape[1]] = self._listed
            self._listed = wider

    def _continues(self, row: int, text: Sequence[int]) -> int:
        """From where on a row is to be counted; its counts are zeroed if from the beginning."""
        counted, last = self._last[row]
        same = self._texts[row] is text and counted <= len(text)
        if same and (not counted or text[counted - 1] == last):
            return counted
        self._table[row] = 0
        self._listed[row] = 0
        self._different[row].clear()
        return 0
