"""A progress bar over finished prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def with_bar(items: Iterable[Item], total: int, *, shown: bool) -> Iterable[Item]:
    """Returns the items, and shows on standard error how many of ``total`` have come."""
    if not shown:
        return items
    return track(items, "generating", total=total, console=Console(stderr=True))
