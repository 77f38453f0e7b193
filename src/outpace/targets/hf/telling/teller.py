"""What tells one part of a model where the tokens of a pass stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from outpace.targets.hf.slots.masks import Layout


class Teller(ABC):
    """One or some modules that count slots or columns where they should count positions."""

    @abstractmethod
    def told(self, layout: Layout) -> AbstractContextManager[None]:
        """Lets the modules count by a layout's positions while the block runs. Behind it the model
        is as it was."""
