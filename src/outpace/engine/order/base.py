"""What decides which waiting request joins the batch next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from outpace.engine.request import Request


class Order(ABC):
    """Compares requests, which stand in lines: of the line with the smallest key the request with
    the smallest key joins first, and is put aside last.

    What an order learns from requests that come and rounds that are played changes when a text is
    written, and never what it says.
    """

    name: str

    @abstractmethod
    def key(self, request: Request) -> tuple[float, ...]:
        """Returns what the request is sorted by in its line, which stays the same while it waits.
        Ties are broken by the time of arrival."""

    def line_of(self, request: Request) -> Hashable:
        """Returns the line that the request stands in, for good."""
        return None

    def line_key(self, line: Hashable) -> tuple[float, ...]:
        """Returns what lines are sorted by, which may change at any time."""
        return ()

    def arrives(self, request: Request) -> None:
        """Learns of a request that begins to wait."""

    def joins(self, request: Request) -> None:
        """Learns of a request that takes a row; of one that was put aside, each time."""

    def played(self, requests: Sequence[Request]) -> None:
        """Learns of a round. The requests have their new tokens, and some may have ended."""
