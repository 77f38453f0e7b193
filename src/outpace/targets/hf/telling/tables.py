"""Tables of positions that are looked up by what the cache holds (the decoders of BART and its
kin, which take no ``position_ids``)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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
    """A table, some of which begin with rows that are nobody's."""

    def __init__(self, table: nn.Embedding) -> None:
        self._table: Any = table

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        rows = layout.positions + getattr(self._table, "offset", 0)

        def placed(*_: Any, **__: Any) -> Tensor:
            return embedding(rows, self._table.weight)

        with exchange.attribute(self._table, "forward", placed):
            yield
