"""Where drafted tokens stand in a decoder that counts positions by slots.

Decoders of encoder-decoders do not all take ``position_ids``. Most look their positions up in a
table, counted from what the cache holds, or make a bias of the distance between slots (T5). In a
draft a token's position is not its slot. For the time of a pass these modules are told the
positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import UnsupportedModel
from outpace.targets.hf.telling import exchange
from outpace.targets.hf.telling.tables import looked_up


@dataclass(frozen=True, eq=False)
class Places:
    """Where the columns and the slots of a pass stand in their texts."""

    positions: Tensor  # [A, T]
    slot_positions: Tensor  # [A, S]; meaningful only for slots that are seen
    tokens: Tensor | None  # [A, T]; None where embeddings stand for them

    @cached_property
    def distances(self) -> Tensor:
        """``[A, T, S]``: how far behind each column each slot stands, before it if negative."""
        return self.slot_positions[:, None, :] - self.positions[:, :, None]


Placed = Callable[[Places], Any]
"""Makes a function that stands for a module's own while the columns stand in these places."""


class Placing:
    """How one model is told the places of its decoder's columns.

    Raises ``UnsupportedModel`` for a decoder that cannot be told.
    """

    def __init__(self, model: nn.Module) -> None:
        loaded: Any = model
        self._takes_positions = (
            "decoder_position_ids" in inspect.signature(loaded.forward).parameters
        )
        self._exchanged = list(_exchanged(loaded.get_decoder()))
        if not (self._takes_positions or self._exchanged):
            raise UnsupportedModel(
                f"{type(model).__name__} places its decoder's tokens in a way that outpace does "
                "not know: use another encoder-decoder."
            )

    @property
    def counts_padding(self) -> bool:
        """Whether the model's own ``generate`` counts padding before a text as tokens of it."""
        looked_up = any(name == "forward" for _, name, _ in self._exchanged)
        return looked_up and not self._takes_positions

    @contextmanager
    def told(self, places: Places) -> Iterator[dict[str, Tensor]]:
        """Tells the places while the block runs; yields further arguments of the model."""
        with ExitStack() as stack:
            for module, name, placed in self._exchanged:
                stack.enter_context(exchange.attribute(module, name, placed(places)))
            yield {"decoder_position_ids": places.positions} if self._takes_positions else {}


def _exchanged(decoder: nn.Module) -> Iterator[tuple[nn.Module, str, Placed]]:
    """Yields the modules that count positions themselves, with the methods that do."""
    table: Any = getattr(decoder, "embed_positions", None)
    if isinstance(table, nn.Embedding):
        yield table, "forward", lambda places: looked_up(table, places.positions)
    elif hasattr(table, "create_position_ids_from_input_ids"):
        yield table, "forward", lambda places: _behind_padding(table, places)
    for module in decoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            yield module, "compute_bias", _of_module(module)


def _of_module(module: nn.Module) -> Placed:
    return lambda places: _by_distance(module, places)


def _behind_padding(table: Any, places: Places) -> Callable[..., Tensor]:
    """M2M100's table: position 0 is the one behind the number of the padding token, and padding
    has no position."""
    rows = places.positions + table.padding_idx + 1
    if places.tokens is not None:
        rows = torch.where(places.tokens == table.padding_idx, table.padding_idx, rows)
    return lambda *_, **__: table.weights[rows]


def _by_distance(module: Any, places: Places) -> Callable[..., Tensor]:
    """T5's bias, a number for each bucket of distances and each head: ``[A, H, T, S]``."""

    def compute_bias(*_: Any, **__: Any) -> Tensor:
        found: Tensor = module.relative_attention_bias(_buckets(module, places.distances))
        return found.permute(0, 3, 1, 2)

    return compute_bias


def _buckets(module: Any, distance: Tensor) -> Tensor:
    bucket = module._relative_position_bucket
    named = {
        "bidirectional": False,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }
    known: Sequence[str] = list(inspect.signature(bucket).parameters)
    found: Tensor = bucket(distance, **{name: named[name] for name in named if name in known})
    return found
