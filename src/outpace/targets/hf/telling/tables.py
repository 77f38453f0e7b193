"""Tables of positions that are looked up by what the cache holds (the decoders of BART and its
kin, which take no ``position_ids``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding

from outpace.targets.hf.slots.masks import Layout
from outpace.targets.hf.telling import exchange
from outpace.targets.hf.telling.teller import Teller


def tellers(model: nn.Module) -> Iterator[Teller]:
    """Yields what tells a model's tables of positions which rows to look up."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return
    for module in model.modules():
        table = getattr(module, "embed_positions", None)
        if isinstance(table, nn.Embedding):
            yield Table(table)


class Table(Teller):
    """A table of positions, whose rows are looked up by the layout's positions."""

    def __init__(self, table: nn.Embedding) -> None:
        self._table: Any = table

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        with exchange.attribute(self._table, "forward", looked_up(self._table, layout.positions)):
            yield


def looked_up(table: Any, positions: Tensor) -> Callable[..., Tensor]:
    """Returns what stands for a table's ``forward`` while columns have positions ``[A, T]``."""
    rows = positions + getattr(table, "offset", 0)  # before these stand rows of no position
    return lambda *_, **__: embedding(rows, table.weight)
