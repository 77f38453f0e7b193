"""What decides which waiting request joins the batch next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from outpace.engine.request import Request


class Order(ABC):
    """Compares requests: the one with the smallest key joins first, and is put aside last.

    What an order learns from requests that come and rounds that are played changes when a text is
    written, and never what it says.
    """

    name: str

    @abstractmethod
    def key(self, request: Request) -> tuple[float, ...]:
        """Returns what the request is sorted by. Ties are broken by the time of arrival."""

    def arrives(self, request: Request) -> None:
        """Is told of a request that begins to wait."""

    def joins(self, request: Request) -> None:
        """Is told of a request that takes a row; of one that was put aside, each time."""

    def played(self, requests: Sequence[Request]) -> None:
        """Is told of a round. The requests have their new tokens, and some may have ended."""
