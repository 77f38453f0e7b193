"""What a format is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from outpace.errors import ConfigError
from outpace.heads.base import Head
from outpace.heads.folder import Folder


def architectures(about: Mapping[str, Any]) -> set[str]:
    """Returns the architectures that a configuration names; none where the entry is no list."""
    listed = about.get("architectures")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


@dataclass(frozen=True, eq=False)
class Content:
    """What a folder with a head holds."""

    about: Mapping[str, Any]
    """Its configuration."""
    weights: Mapping[str, Tensor]
    file: str = "model.safetensors"
    """Where the weights are."""


class Format(ABC):
    """Reads and writes heads."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        """Returns whether a configuration is in this format."""

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str | None:
        """Returns the kind of head that a configuration in this format is of; None where it may as
        well be that of a model."""
        return cls.name

    @classmethod
    @abstractmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        """Returns the head in a folder; ``ModelLoadError`` with the cause and the remedy."""

    @classmethod
    @abstractmethod
    def write(cls, head: Head) -> Content:
        """Returns a head in this format; ``ConfigError`` where it has no words for it."""

    @classmethod
    def refuse(cls, why: str) -> ConfigError:
        """Returns the error for a head that this format has no words for."""
        return ConfigError(f"the format {cls.name!r} {why}: keep the head in the format 'outpace'.")
