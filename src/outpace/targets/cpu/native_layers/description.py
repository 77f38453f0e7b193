"""The description of a decoder layer, as `layer.h` computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from torch import Tensor

from outpace.targets.cpu.native_layers.experts import Mixture
from outpace.targets.cpu.native_layers.latent import BOTH as BOTH_OF_LATENTS
from outpace.targets.cpu.native_layers.latent import Latent
from outpace.targets.cpu.native_layers.probing import NO_CLIP, Clip, Norm
from outpace.targets.cpu.native_layers.product import Linear
from outpace.targets.cpu.native_layers.recurrence import Recurrence

SINKS = "sinks"
"""What attention calls the scores of a slot without values."""


class RotaryStyle(IntEnum):
    """Which numbers of a head rotary embedding rotates together, by the numbers in `ops.h`."""

    NONE = 0
    """The layer knows no positions."""
    HALVES = 1
    """NeoX's."""
    INTERLEAVED = 2
    """Neighbours (GPT-J's), each with an angle of its own in the table, which are the same."""
    INTERLEAVED_HALF_TABLE = 3
    """Neighbours, whose angles are the first half of the table."""
    HALVES_HALF_TABLE = 4
    """Halves, where the table has an angle for two numbers."""
    DEINTERLEAVED = 5
    """As `INTERLEAVED_HALF_TABLE`; afterwards all first ones come before all second ones."""


OF_LATENTS = (RotaryStyle.DEINTERLEAVED, RotaryStyle.INTERLEAVED_HALF_TABLE, RotaryStyle.HALVES)
"""Those of latent attention."""


@dataclass(frozen=True, eq=False)
class LayerDescription:
    """One decoder layer."""

    layer: Any
    attention: Any
    """Or what stands in its place."""
    linears: tuple[Linear | None, ...]
    """Queries, keys, values, output; gate (None where the MLP is not gated), up, down; and two
    more, None where there are no latents. With a mixture gate, up and down are of the MLP that all
    tokens meet, and may all be None. With latents the second makes these, and the third keys and
    values of them; the two more are what queries are made from, or None, and what makes keys, if
    the third makes values alone. What keeps a state has the output alone of the first four."""
    norms: tuple[Norm | None, ...]
    """Before and after attention, before and after the MLP, of queries, of keys; with latents of
    what queries are made from, and of latents."""
    parallel: bool
    """Whether the MLP is given what attention is given."""
    norm_over_heads: bool
    """Whether all heads are normalised together, not each by itself."""
    norm_stride: int
    """Between the weights of the norms of two heads; 0 where they share them."""
    activation: int
    scaling: float
    softcap: float
    """Soft bound of the scores; 0: they have none."""
    residual_multiplier: float
    """By which is multiplied what is added to the residual stream."""
    mixture: Mixture | None = None
    latent: Latent | None = None
    recurrence: Recurrence | None = None
    clip: Clip = NO_CLIP
    reads_embeddings: bool = False
    """Whether attention reads the embedding of a token, too, before its hidden state (EAGLE-3)."""
    embedding_norm: Norm | None = None
    """What normalises these embeddings."""
    rotary: RotaryStyle = RotaryStyle.HALVES
    angles: int = 0
    """Which of the angles of a pass are its own."""
    mask: int = 0

    @property
    def dim(self) -> int:
        """Numbers of a value in the cache."""
        if self.recurrence is not None:
            return 0
        return int(self.attention.head_dim) if self.latent is None else self.latent.size

    @property
    def hidden(self) -> int:
        return self.made(3).outputs

    @property
    def width(self) -> int:
        """The inputs of the last product before the MLP."""
        return int(getattr(self.made(3).module, "in_features", 0))

    @property
    def heads(self) -> int:
        if self.recurrence is not None:
            return 0
        return self.width // self.dim if self.latent is None else self.latent.heads

    @property
    def gated_heads(self) -> bool:
        """Whether each query has the gate of its head's output after it (Qwen3-Next)."""
        keys = self.recurrence is None and self.latent is None
        return keys and self.made(0).outputs == 2 * self.width

    @property
    def knows_positions(self) -> bool:
        """Whether it has rotary position embeddings."""
        return self.recurrence is None and self.rotary is not RotaryStyle.NONE

    @property
    def kv_heads(self) -> int:
        """Key heads, or, of latents, groups of heads that go through the slots together."""
        if self.recurrence is not None:
            return 0
        if self.latent is not None:
            return self.heads // self.latent.each
        return self.made(1).outputs // self.dim

    @property
    def cached(self) -> tuple[int, int, int]:
        """Heads in the cache, and the numbers of a key and of a value there."""
        if self.latent is None:
            return self.kv_heads, self.dim, self.dim
        return 1, self.latent.size, self.latent.rope

    def made(self, number: int) -> Linear:
        """Returns one of the first four linear layers."""
        found = self.linears[number]
        assert found is not None
        return found

    @property
    def modules(self) -> list[Any]:
        """The modules whose weights the library reads."""
        linears = [linear.module for linear in self.linears if linear is not None]
        for part in (self.recurrence, self.mixture):
            linears += [] if part is None else part.modules
        norms = (*self.norms, self.embedding_norm)
        return [*linears, *(norm.module for norm in norms if norm is not None)]

    @property
    def sinks(self) -> Tensor | None:
        """The score of each head for a slot without values that all tokens see."""
        found: Tensor | None = self.attention._parameters.get(SINKS)
        return found

    @property
    def inside(self) -> list[Any]:
        """The other modules that are a part of what the library computes."""
        found = [] if self.mixture is None else [*self.mixture.experts.modules()]
        found += [] if self.recurrence is None else self.recurrence.inside
        both = getattr(self.attention, BOTH_OF_LATENTS, None)
        return found if both is None else [*found, both]

    @property
    def others(self) -> list[tuple[Any, str]]:
        """Where the layer keeps further numbers that the library reads."""
        found = [(self.attention._parameters, SINKS)] if self.sinks is not None else []
        found += [] if self.recurrence is None else self.recurrence.numbers
        if self.mixture is not None and self.mixture.held is not None:
            found.append(self.mixture.held)
        return found

    def candidates(self) -> Iterator[LayerDescription]:
        """Yields descriptions of which one at most gives the layer's numbers: its attributes do not
        say how heads are rotated."""
        if self.recurrence is not None:
            yield self
            return
        usual = [
            each
            for each in RotaryStyle
            if each not in (RotaryStyle.HALVES, RotaryStyle.DEINTERLEAVED)
        ]
        for rotary in (RotaryStyle.HALVES, *usual) if self.latent is None else OF_LATENTS:
            yield replace(self, rotary=rotary)


def kinds_of(config: Any, layers: int) -> Mapping[str, int]:
    """Returns the types of layers that a configuration lists, each with its number."""
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    return {name: number for number, name in enumerate(dict.fromkeys(types[:layers]))}
