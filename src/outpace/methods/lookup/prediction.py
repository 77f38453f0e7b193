"""The text that a user expects, such as the file that a model is to edit: where look-ups search
first (OpenAI's "predicted outputs")."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.request import PerRequest
from outpace.draft.base import Rows
from outpace.draft.token_trees import TokenTree
from outpace.methods.lookup.occurrences import Occurrences

REACH = 16
"""Tokens that are compared."""

TRUST = 4
"""Tokens that are drafted for each token that agrees: a predicted text is expected to come, where
any other text may have gone on in many ways."""

BEGIN = -2
"""Stands before the predicted text and before the text; no token is equal to it."""


class Prediction:
    """Where a text is in the text that was predicted for it.

    As long as the text comes as predicted, its place advances token by token. After a token that
    was not predicted it is the place before which most of the latest tokens stand, of several the
    one that comes next after the old place. All this follows from the text alone.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = Occurrences(REACH)
        self._predicted.extend([BEGIN, *predicted])
        self._latest = [BEGIN]
        self._at = self._predicted.end - len(predicted)
        self._agree = 1
        self.read = 0
        """Tokens of the text that it has followed."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Follows the tokens that come next in the text."""
        for token in tokens:
            self._latest = [*self._latest[1 - REACH :], token]
            if self._agree and self._from(self._at, 1) == [token]:
                self._at, self._agree = self._at + 1, self._agree + 1
            else:
                self._search()
        self.read += len(tokens)

    def _search(self) -> None:
        old, refuted = self._at, self._at if self._agree else None
        places, agree = self._predicted.matches(self._latest)
        self._agree = int(agree.max(initial=0))
        if self._agree:
            best = places[agree == self._agree].tolist()
            self._at = min(best, key=lambda at: (at == refuted, at < old, abs(at - old)))

    def guess(self, budget: int) -> TokenTree:
        """Returns what comes next as it was predicted; nothing where the text is another one."""
        tokens = self._from(self._at, min(budget, TRUST * self._agree))
        chain = TokenTree.chain(tokens)
        chain.chances, chain.predicted = [1.0] * len(tokens), True
        agree = [self._agree + place for place in range(len(tokens))]
        chain.confidence = [tokens / (tokens + 2) for tokens in agree]
        return chain

    def _from(self, place: int, count: int) -> list[int]:
        return self._predicted.tokens(place, min(place + count, self._predicted.end))


class Predictions:
    """The predicted texts of all requests that have one."""

    def __init__(self) -> None:
        self._texts = PerRequest(lambda request: Prediction(request.prediction))

    def catch_up(self, rows: Rows, row: int) -> None:
        """Follows the tokens of a row that came since it was asked last."""
        if rows.requests[row].prediction:
            text = self._texts[rows.requests[row]]
            text.follow(rows.since(row, len(rows.history.prompts[row]) + text.read))

    def guess(self, rows: Rows, row: int, budget: int) -> TokenTree:
        """Returns what comes next in a row as it was predicted, at most ``budget`` tokens."""
        request = rows.requests[row]
        if not request.prediction:
            return TokenTree()
        self.catch_up(rows, row)
        return self._texts[request].guess(budget)
