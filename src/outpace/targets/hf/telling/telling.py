"""Everything that one model has to be told about the positions of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from outpace.targets.hf.extra import Extra, Pass
from outpace.targets.hf.seq2seq.lengths import is_encoder_decoder
from outpace.targets.hf.slots.masks import Layout
from outpace.targets.hf.telling import alibi, blocks, local, tables, temperature
from outpace.targets.hf.telling.teller import Teller

KINDS: tuple[Callable[[nn.Module], Iterator[Teller]], ...] = (
    alibi.tellers,
    blocks.tellers,
    local.tellers,
    tables.tellers,
    temperature.tellers,
)
"""Each finds the parts of a model that it knows how to tell."""


class Telling(Extra):
    """What one model has to be told; for most models nothing, since they take ``position_ids``."""

    needs_layout = True
    prevents_fixed = "counts positions by slots of the cache"

    def __init__(self, model: nn.Module) -> None:
        # The decoder of an encoder-decoder is told in another way (`seq2seq.placing`).
        kinds = () if is_encoder_decoder(model) else KINDS
        self._tellers = [teller for kind in kinds for teller in kind(model)]

    @property
    def needed(self) -> bool:
        """Whether any part of the model counts otherwise than by ``position_ids``."""
        return bool(self._tellers)

    def around(self, given: Pass) -> AbstractContextManager[None]:
        assert given.layout is not None
        return self.told(given.layout)

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        """Tells the model a layout while the block runs."""
        with ExitStack() as stack:
            for teller in self._tellers:
                stack.enter_context(teller.told(layout))
            yield
