"""The orders in which a linear layer of our own holds its weight."""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from outpace.targets.cpu.native import in_rows


class Layout(Enum):
    """How a layer with N outputs and K inputs holds its weight, and as which parameter."""

    ROWS = "rows", "weight"
    """``[N, K]``."""
    TRANSPOSED = "transposed", "weight"
    """``[K, N]``, over memory that holds rows: what GPT-2's layers show."""
    PANELS = "panels", "panels"
    """``[N / panel, K, panel]`` (`native.laid_out`)."""

    def __init__(self, _: str, parameter: str) -> None:
        self.parameter = parameter
        """The name of the parameter."""

    def for_products(self, held: Tensor) -> Tensor:
        """Returns the parameter as our products read it: in rows or in panels, nothing copied."""
        return held.t() if self is Layout.TRANSPOSED else held

    def rows(self, held: Tensor) -> Tensor:
        """Returns the weight ``[N, K]``: a copy, if it is held in panels."""
        return in_rows(held) if self is Layout.PANELS else self.for_products(held)
