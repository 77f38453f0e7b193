"""Drafters that exist in a test only, found by name as those of another package are."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.core import lazy
from outpace.draft.base import Drafter
from outpace.draft.registry import GROUP


def register(monkeypatch: pytest.MonkeyPatch, *kinds: type[Drafter]) -> None:
    """Lets ``speculative_config`` name these drafters."""

    class Entry:
        def __init__(self, kind: type[Drafter]) -> None:
            self.name, self.value, self._kind = kind.name, kind.__name__, kind

        def load(self) -> Any:
            return self._kind

    entries = tuple(map(Entry, kinds))
    monkeypatch.setattr(lazy, "_entry_points", lambda group: entries if group == GROUP else ())
