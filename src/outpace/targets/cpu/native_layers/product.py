"""Linear layers whose products are our own code's, and products that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.core.logits.truncation import NEG_INF
from outpace.targets.cpu.native import Native
from outpace.targets.cpu.native_layers.probing import is_plain
from outpace.targets.cpu.weights.weight import (
    LinearStruct,
    PreparedLinears,
    Weight,
    in_rows,
    linear_struct,
)


class WeightLayout(Enum):
    """How a layer with N outputs and K inputs holds its weight, and as which parameter."""

    ROWS = "rows", "weight"
    """``[N, K]``."""
    TRANSPOSED = "transposed", "weight"
    """``[K, N]``, over memory that holds rows: what GPT-2's layers show."""
    PANELS = "panels", "panels"
    """``[N / panel, K, panel]`` (`weight.to_panels`)."""

    def __init__(self, _: str, parameter: str) -> None:
        self.parameter = parameter
        """The name of the parameter."""

    def for_products(self, held: Tensor) -> Tensor:
        """Returns the parameter as our products read it: in rows or in panels, nothing copied."""
        return held.t() if self is WeightLayout.TRANSPOSED else held

    def rows(self, held: Tensor) -> Tensor:
        """Returns the weight ``[N, K]``: a copy, if it is held in panels."""
        return in_rows(held) if self is WeightLayout.PANELS else self.for_products(held)


UNLIMITED = 1 << 60


class NativeProduct(nn.Module):
    """A linear layer that reads its weight once for all rows of a small product."""

    bias: Any
    """``[N]``, or None."""

    def __init__(self, library: Native, outputs: int, inputs: int) -> None:
        super().__init__()
        self.library = library
        self.out_features, self.in_features = outputs, inputs
        self.most = UNLIMITED
        """Rows up to which products are ours."""
        self._fused = FusedProduct(library, [self])

    @property
    def read(self) -> Tensor:
        """The tensor that products read."""
        raise NotImplementedError

    @property
    def pointers(self) -> tuple[int, int | None]:
        """Where the weight is, and the bias if there is one: somebody may put others there."""
        bias = self._parameters.get("bias")
        return self.read.data_ptr(), None if bias is None else bias.data_ptr()

    def place(self) -> tuple[Any, str]:
        """Returns the dictionary that holds `read`, and its name there. Both stay the same."""
        raise NotImplementedError

    def as_weight(self) -> Weight:
        """Returns the tensors that products read."""
        raise NotImplementedError

    def some(self, outputs: Sequence[int]) -> tuple[Weight, list[int]]:
        """Returns a copy of the weight of some outputs, maybe with others between them, and where
        in it they are."""
        raise NotImplementedError

    def dense(self, x: Tensor) -> Tensor:
        """Returns the product by torch: x ``[..., K]`` -> ``[..., N]``."""
        raise NotImplementedError

    def compiled(self, x: Tensor) -> Tensor:
        """Returns the product as an operator that torch's compiler leaves alone."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., K]`` -> ``[..., N]``."""
        if torch.compiler.is_compiling():
            return self.compiled(x)
        if not self._can(x):
            return self.dense(x)
        return self._fused.product(self, x)

    def share(self, fused: FusedProduct) -> None:
        """Makes this layer compute in the products of ``fused`` from now on."""
        self._fused = fused

    def learns(self, x: Tensor) -> bool:
        """Returns whether gradients are wanted, which our products do not give."""
        return torch.is_grad_enabled() and (x.requires_grad or self.read.requires_grad)

    def _can(self, x: Tensor) -> bool:
        fits = 0 < x.numel() <= self.most * self.in_features
        return fits and not self.learns(x) and x.device.type == "cpu"

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(NamedTuple):
    """Some outputs in a row of a linear layer."""

    module: Any
    first: int
    outputs: int

    def weight(self) -> Weight:
        """Returns the tensors that products read: nothing is copied."""
        whole = weight_of(self.module)
        return whole if self.outputs == whole.outputs else whole.some(self.first, self.outputs)

    @property
    def fits(self) -> bool:
        """Whether products can read these outputs."""
        return takes(self.module) and self.first % weight_of(self.module).panel == 0


def weight_of(linear: Any) -> Weight:
    """Returns the tensors of a linear layer that products read."""
    if isinstance(linear, NativeProduct):
        return linear.as_weight()
    return Weight(linear.weight, None, getattr(linear, "bias", None))


def takes(linear: Any) -> bool:
    """Whether products can read a layer's weight."""
    if type(linear) is nn.Linear:
        return is_plain(linear.weight)
    return isinstance(linear, NativeProduct) and linear.as_weight().matrix.is_contiguous()


def outputs_of(linear: Any) -> int:
    """Returns how many outputs a linear layer has; 0 for something else."""
    return int(getattr(linear, "out_features", 0))


def in_panels(outputs: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Returns the panels of ``width`` outputs that some outputs lie in, and where each of these is
    among all outputs of these panels.

    >>> in_panels([5, 7, 16], 4)
    ([1, 4], [1, 3, 4])
    """
    places = {panel: i for i, panel in enumerate(sorted({each // width for each in outputs}))}
    return list(places), [width * places[each // width] + each % width for each in outputs]


class FusedProduct:
    """Layers that receive the same input one after another, such as q, k and v: one product
    computes all of them.

    The first layer that is called computes the results of the others too. Another layer takes its
    result only if its input is the very same tensor; otherwise it is computed for that layer.
    """

    def __init__(self, library: Native, layers: Sequence[NativeProduct]) -> None:
        self._library = library
        self._layers = tuple(layers)
        # With where its tensors were; replaced as a whole, as what is held.
        self._prepared: tuple[list[int | None], PreparedLinears] | None = None
        # The latest input and its results; replaced as a whole, for the sake of other threads.
        self._held: tuple[Tensor, dict[int, Tensor]] | None = None

    def product(self, layer: NativeProduct, x: Tensor) -> Tensor:
        """Returns ``layer(x)``."""
        held = self._held
        if held is not None and held[0] is x:
            found = held[1].pop(id(layer), None)
            if not held[1]:
                self._held = None
            if found is not None:
                return found
        results = dict(zip(map(id, self._layers), self._results(x), strict=True))
        found = results.pop(id(layer))
        if results:
            self._held = x, results
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: not the results and pointers of this process."""
        return {**self.__dict__, "_prepared": None, "_held": None}

    def _results(self, x: Tensor) -> Sequence[Tensor]:
        prepared = self._ready()
        wide = x if x.dtype == torch.float32 else x.float()
        flat = self._library.products(wide if wide.is_contiguous() else wide.contiguous(), prepared)
        y = flat if wide is x else flat.to(x.dtype)
        shape = x.shape[:-1]
        if len(self._layers) == 1:
            return [y.view(*shape, -1)]
        rows = x.numel() // prepared.inputs
        parts = torch.split(y, [rows * outputs for outputs in prepared.outputs])
        return [part.view(*shape, -1) for part in parts]

    def _ready(self) -> PreparedLinears:
        found, pointers = self._prepared, [at for layer in self._layers for at in layer.pointers]
        if found is None or found[0] != pointers:
            found = pointers, PreparedLinears([layer.as_weight() for layer in self._layers])
            self._prepared = found
        return found[1]


@dataclass(frozen=True)
class SubsetHead:
    """A copy of what a head has for some tokens, as a small head of its own."""

    tokens: tuple[int, ...]
    pointer: int
    """To the weight that theirs was copied from."""
    weight: Weight
    """Alive as long as `struct` may be read."""
    struct: LinearStruct
    at: Tensor
    """The tokens."""
    where: Tensor
    """Where they are among its outputs."""
    size: int
    """Tokens of the vocabulary, V."""

    @classmethod
    def of(cls, tokens: tuple[int, ...], head: NativeProduct) -> SubsetHead:
        """Copies what a head has for these tokens."""
        weight, where = head.some(tokens)
        return cls(
            tokens=tokens,
            pointer=head.read.data_ptr(),
            weight=weight,
            struct=linear_struct(weight),
            at=torch.tensor(tokens),
            where=torch.tensor(where),
            size=head.out_features,
        )

    def are(self, tokens: tuple[int, ...], head: NativeProduct) -> bool:
        """Whether they are these tokens of this head."""
        return self.tokens == tokens and self.pointer == head.read.data_ptr()

    def spread(self, found: Tensor, first: int) -> Tensor:
        """Returns logits ``[A, keep, V]`` from those of the first tokens and of these, ``[A, keep,
        first + outputs]``; all others are -inf."""
        logits = found.new_full((*found.shape[:-1], self.size), NEG_INF)
        logits[..., :first] = found[..., :first]
        logits[..., self.at] = found[..., first:][..., self.where]
        return logits


def side_by_side(logits: Tensor, first: int) -> None:
    """Puts what two heads wrote one after the other, ``[A, keep, first]`` and ``[A, keep, rest]``,
    side by side, in place: ``[A, keep, first + rest]``."""
    rows, keep, both = logits.shape
    if rows * keep == 1:
        return
    flat, border = logits.view(-1).clone(), rows * keep * first
    logits[..., :first] = flat[:border].view(rows, keep, first)
    logits[..., first:] = flat[border:].view(rows, keep, both - first)
