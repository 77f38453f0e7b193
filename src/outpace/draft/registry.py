"""Drafters by name, ours and those that other packages register."""

from __future__ import annotations

from importlib.metadata import entry_points

from outpace.draft.base import Drafter
from outpace.draft.lookup.ngram import NgramDrafter
from outpace.draft.models.chain import DraftModel
from outpace.draft.models.tree import DraftTree
from outpace.draft.none import NoDrafter
from outpace.errors import ConfigError, did_you_mean

GROUP = "outpace.drafters"
"""Entry-point group in which other packages name their `Drafter` subclasses."""


def drafters() -> dict[str, type[Drafter]]:
    """Returns all drafters by name."""
    own: list[type[Drafter]] = [NoDrafter, NgramDrafter, DraftModel, DraftTree]
    found = {drafter.name: drafter for drafter in own}
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            raise ConfigError(
                f"drafter {entry.name!r} of {entry.value} has the name of another one."
            )
        found[entry.name] = entry.load()
    return found


def find_drafter(name: str) -> type[Drafter]:
    """Returns the drafter of this name; ``ConfigError`` with a suggestion if there is none."""
    known = drafters()
    if name not in known:
        raise ConfigError(f"unknown method {name!r}{did_you_mean(name, known)}.")
    return known[name]
