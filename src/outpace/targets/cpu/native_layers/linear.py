"""Linear layers on our own products: one copy of the weights, read once for a few rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from outpace.targets.cpu.linear import as_custom_op, can_pack, packed_product
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.product import (
    FusedProduct,
    NativeProduct,
    WeightLayout,
    in_panels,
)
from outpace.targets.cpu.race import native_reads_prompts
from outpace.targets.cpu.weights.layers import matrix_of
from outpace.targets.cpu.weights.narrow import narrowed, to_int8
from outpace.targets.cpu.weights.weight import PreparedLinears, Weight, to_panels
from outpace.targets.hf.plain import forward_uncached

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of models whose layers can be replaced by these."""

INVARIANT_ROWS = 64
"""Rows up to which each has the same bits, whatever their number (`dense_products.h`)."""

WIDE_LANES = 8
"""Lanes of the vectors (AVX2 has 8 floats, AVX-512 has 16) from which on our products of many rows
keep up with oneDNN's. With the 4 of other processors, prompts are left to oneDNN."""


class NativeLinear(NativeProduct):
    """A linear layer that reads its weight once for all rows of a small product.

    A row of the result has the same bits whatever other rows share the product, up to
    `INVARIANT_ROWS` rows. Products of more than ``most`` rows are left to oneDNN
    (`prepack_weights`). The weight may have a narrower dtype than the activations. Sums are always
    in float32.

    ``weight`` is the parameter itself, or a copy of it in rows that is made at each look where it
    is held in panels, or a tensor without numbers (`show`).
    """

    def __init__(
        self,
        library: Native,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        scale: Tensor | None = None,
        layout: WeightLayout = WeightLayout.ROWS,
        of_conv1d: bool = False,
        loaded_bytes: int | None = None,
    ) -> None:
        """weight: in rows or transposed, as ``layout`` says. scale: float32 ``[N]``, for integers.
        of_conv1d: the layer stands for one of GPT-2's kind, whose weight is ``[K, N]``.
        loaded_bytes: of the weight in the dtype in which it was loaded, if that was another one."""
        outputs, inputs = layout.rows(weight).shape
        super().__init__(library, outputs, inputs)
        self.layout = layout
        self.weight = weight
        self.bias = bias
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self._of_conv1d = of_conv1d
        self._shown: Tensor | None = None
        self._compilable = as_custom_op("native_linear", _product, _shape)
        self.loaded_bytes = weight.nbytes if loaded_bytes is None else loaded_bytes
        self._onednn = can_pack()

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            shown = self.__dict__.get("_shown")
            if shown is not None:
                return shown
            panels = self._parameters.get("panels")
            if panels is not None:
                return WeightLayout.PANELS.rows(panels)
        return super().__getattr__(name)

    def show(self, dtype: torch.dtype) -> None:
        """Shows a ``weight`` of this dtype to whoever asks for it, without numbers: for models that
        convert the layer's input to the dtype of its weight."""
        outputs, inputs = self.out_features, self.in_features
        shape = (inputs, outputs) if self._of_conv1d else (outputs, inputs)
        self._shown = torch.empty(shape, dtype=dtype, device="meta")

    @property
    def read(self) -> Tensor:
        """The parameter that products read, in its `WeightLayout`."""
        parameters = self._parameters  # asking the layer for one takes longer
        found: Tensor = parameters[self.layout.parameter]  # type: ignore[assignment]
        return found

    @property
    def can_prepack(self) -> bool:
        """Whether the weight can be put into panels: its outputs fill them."""
        return self.layout is WeightLayout.ROWS and self.out_features % self.library.panel == 0

    def prepack(self) -> None:
        """Puts the weight into panels (`weight.to_panels`), the order in which products read it.

        It is held only so: from then on ``weight`` is a copy that is made at each look.
        """
        panels = to_panels(self.read.detach(), self.library.panel)
        self.panels = nn.Parameter(panels, requires_grad=self.read.requires_grad)
        self.layout = WeightLayout.PANELS
        del self._parameters["weight"]

    def as_weight(self) -> Weight:
        """Returns the tensors that products read."""
        bias = None if self.bias is None else self.bias.float()
        return Weight(self.layout.for_products(self.read), self.scale, bias)

    def some(self, outputs: Sequence[int]) -> tuple[Weight, list[int]]:
        """Returns the weight of some outputs, of whole panels where it is held in these."""
        matrix, scale, bias, _ = self.as_weight()
        width = matrix.shape[2] if self.layout is WeightLayout.PANELS else 1
        panels, where = in_panels(outputs, width)

        def taken(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else numbers.view(-1, width)[panels].flatten()

        return Weight(matrix[panels].contiguous(), taken(scale), taken(bias)), where

    def place(self) -> tuple[Any, str]:
        """Returns the dictionary that holds `read`, and its name there."""
        return self._parameters, self.layout.parameter

    def compiled(self, x: Tensor) -> Tensor:
        """Returns the product as an operator that torch's compiler leaves alone."""
        y: Tensor = self._compilable(x.float().contiguous(), *self.as_weight()[:3])
        return y.to(x.dtype)

    def dense(self, x: Tensor) -> Tensor:
        """Returns the same by torch's products."""
        matrix = self.layout.rows(self.read).to(x.dtype)
        if self.scale is not None:
            matrix = matrix * self.scale[:, None]
        plain = x.dtype == torch.float32 and not self.learns(x)
        if self._onednn and plain and x.numel():
            return packed_product(x, matrix, self.bias)
        return linear(x, matrix, self.bias)

    def plain_weight(self) -> Tensor:
        """Returns a copy of the weight as the layer that this one replaced would hold it: in rows,
        integers times their scales, and transposed if it was GPT-2's kind of layer."""
        rows = self.layout.rows(self.read.detach())
        if self.scale is not None:
            rows = rows * self.scale[:, None]
        return rows.t().contiguous() if self._of_conv1d else rows

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (
            destination.pop(prefix + "scale", None) is not None
            or self.layout is WeightLayout.PANELS
        ):
            destination.pop(prefix + "panels", None)
            destination[prefix + "weight"] = self.plain_weight()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: all but what belongs to this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_compilable"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compilable = as_custom_op("native_linear", _product, _shape)
        if not self.library.takes(self.read.dtype):  # a compiler without float16 has made it
            self.read.data = self.read.data.float()
        if self.layout is WeightLayout.PANELS and self.panels.shape[2] != self.library.panel:
            self._take_out_of_panels()  # of a processor with other vectors

    def _take_out_of_panels(self) -> None:
        panels = self._parameters.pop("panels")
        assert panels is not None
        rows = self.layout.rows(panels)
        self.weight = nn.Parameter(rows, requires_grad=panels.requires_grad)
        self.layout = WeightLayout.ROWS
        if self.can_prepack:
            self.prepack()


def _product(x: Tensor, matrix: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    library = native()
    assert library is not None, "its layers exist"
    weight = Weight(matrix, scale, bias)
    return library.products(x, PreparedLinears([weight])).view(*x.shape[:-1], weight.outputs)


def _shape(x: Tensor, matrix: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], Weight(matrix, scale, bias).outputs)


# -- making them -------------------------------------------------------------------------------


def native_linear(library: Native, layer: Any) -> NativeLinear:
    """Returns a layer with the parameters of a plain linear one, its weight in a narrower dtype if
    that changes no element."""
    of_conv1d = type(layer) is Conv1D
    layout = WeightLayout.TRANSPOSED if of_conv1d else WeightLayout.ROWS
    matrix = matrix_of(layer)
    found = narrowed(matrix, library.takes)
    if of_conv1d:  # the parameter keeps its shape [K, N], over memory that holds [N, K]
        layer.weight.data = matrix.t()
    if found is matrix:
        weight = layer.weight
    else:
        weight = nn.Parameter(found.t() if of_conv1d else found, requires_grad=False)
    return NativeLinear(
        library,
        weight,
        layer.bias,
        layout=layout,
        of_conv1d=of_conv1d,
        loaded_bytes=matrix.nbytes,
    )


def native_int8(library: Native, layer: Any) -> NativeLinear:
    """Returns a layer with a plain linear one's weight as 8-bit integers, a scale per output."""
    integers, scale = to_int8(matrix_of(layer))
    weight = nn.Parameter(integers, requires_grad=False)
    # An `Int8Linear`, which is used where there is no compiler, has a zero point with each scale.
    # As many bytes are counted here (the scales themselves are a parameter, and counted as such):
    # costs of passes, and with them seeded texts, must not depend on a compiler.
    loaded = integers.nbytes + scale.nbytes
    return NativeLinear(
        library,
        weight,
        layer.bias,
        scale=scale,
        of_conv1d=type(layer) is Conv1D,
        loaded_bytes=loaded,
    )


@torch.no_grad()
def prepack_weights(model: nn.Module, tune: bool = False) -> int:
    """Puts the weights of a model into panels (`NativeLinear.prepack`); returns of how many layers.

    Weights that other modules read too, such as embeddings, stay in rows. So do float32 weights
    where oneDNN is much faster at products of many rows, which it then computes. Where that is so
    is a fixed rule; ``tune`` asks a race instead.
    """
    layers = [module for module in model.modules() if isinstance(module, NativeLinear)]
    wide = [layer for layer in layers if layer.read.dtype == torch.float32]
    if wide and not reads_prompts(wide[0], tune):
        for layer in wide:
            layer.most = INVARIANT_ROWS
        layers = [layer for layer in layers if layer.most > INVARIANT_ROWS]
    readers = Counter(id(own) for each in model.modules() for own in each._parameters.values())
    found = [layer for layer in layers if layer.can_prepack and readers[id(layer.read)] == 1]
    for layer in found:
        layer.prepack()
    return len(found)


def reads_prompts(layer: NativeLinear, tune: bool = False) -> bool:
    """Returns whether our products are used for many rows too, and not oneDNN's."""
    if not tune:
        return layer.library.lanes >= WIDE_LANES
    return native_reads_prompts(layer)


@torch.inference_mode()
def fuse_products(model: nn.Module) -> int:
    """Lets layers of a causal LM that receive the very same input compute together; returns how
    many do. A pass over one token shows which ones these are."""
    calls: list[tuple[NativeProduct, Tensor, Tensor]] = []

    def note(layer: Any, given: tuple[Tensor, ...]) -> None:
        calls.append((layer, given[0], given[0].clone()))

    layers = [module for module in model.modules() if isinstance(module, NativeProduct)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        if layers:
            forward_uncached(model, [0])
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(id(layer) for layer, _, _ in calls)
    by_input: dict[Any, list[tuple[NativeProduct, Tensor]]] = defaultdict(list)
    for layer, x, copy in calls:
        if times[id(layer)] == 1:
            by_input[id(x), layer.read.dtype].append((layer, copy))
    shared = 0
    for group in by_input.values():
        unchanged = all(torch.equal(copy, group[0][1]) for _, copy in group)
        if len(group) > 1 and unchanged:
            fused = FusedProduct(group[0][0].library, [layer for layer, _ in group])
            for layer, _ in group:
                layer.share(fused)
            shared += len(group)
    return shared
