"""Names for classes that are imported when somebody asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from outpace.errors import ConfigError, did_you_mean


class LazyRegistry:
    """Classes by name: our own as ``"module:Class"``, and those that other packages register as
    entry points.

    Listing the names imports nothing.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, str]) -> None:
        """what: the word for one of them in error messages; group: of the entry points."""
        self._what, self._group, self._own = what, group, dict(own)

    def names(self) -> list[str]:
        """Returns all names, our own first, in the order of the documentation."""
        return [*self._own, *(entry.name for entry in self._registered())]

    def find(self, name: str) -> Any:
        """Returns the class of this name; ``ConfigError`` with a suggestion if there is none, and
        for one of another package that cannot be imported."""
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in self._registered():
            if entry.name == name:
                return self._loaded(entry)
        raise ConfigError(f"unknown {self._what} {name!r}{did_you_mean(name, self.names())}.")

    def all(self) -> dict[str, Any]:
        """Returns all classes by name, which imports them."""
        return {name: self.find(name) for name in self.names()}

    def _loaded(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self._what} {entry.name!r} cannot be imported from {entry.value} ({error}): "
                "mend or uninstall the package that names it in its entry points."
            ) from error

    def _registered(self) -> tuple[EntryPoint, ...]:
        found = _entry_points(self._group)
        for entry in found:
            if entry.name in self._own:
                raise ConfigError(
                    f"{self._what} {entry.name!r} of {entry.value} has the name of another one: "
                    "rename it in the package's entry points."
                )
        return found


@cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    # Reading the metadata of every installed package takes milliseconds.
    return tuple(entry_points(group=group))
