"""How often each token occurs in texts that grow: every token is counted once."""

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
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str = "cpu") -> None:
        self._table = torch.zeros(rows, vocabulary, device=device)
        self._texts: list[Sequence[int] | None] = [None] * rows
        self._last: list[tuple[int, int]] = [(0, -1)] * rows  # counted, and the last token of them

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns the counts ``[B, V]`` of each row's text, valid until the next call.

        Tokens beyond the vocabulary are not counted.
        """
        where: list[tuple[int, int]] = []
        for row, text in enumerate(texts):
            begin = self._continues(row, text)
            where += [(row, token) for token in text[begin:] if token < self._table.shape[1]]
            self._texts[row] = text
            self._last[row] = (len(text), text[-1] if text else -1)
        if where:
            row_of, token_of = to_device(where, self._table.device).unbind(1)
            one = self._table.new_ones(())
            self._table.index_put_((row_of, token_of), one, accumulate=True)
        return self._table

    def _continues(self, row: int, text: Sequence[int]) -> int:
        """From where on a row is to be counted; its counts are zeroed if from the beginning."""
        counted, last = self._last[row]
        same = self._texts[row] is text and counted <= len(text)
        if same and (not counted or text[counted - 1] == last):
            return counted
        self._table[row] = 0
        return 0
