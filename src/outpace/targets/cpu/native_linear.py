"""Linear layers on our own products: one copy of the weights, read once for a few rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from outpace.targets.cpu import packed
from outpace.targets.cpu.layers import matrix_of, to_int8
from outpace.targets.cpu.native import Native, Prepared, Weight, in_rows, laid_out, native
from outpace.targets.cpu.opaque import opaque

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of models whose layers can be exchanged for these."""

NARROW = (torch.bfloat16, torch.float16)
"""Types that can hold a float32 weight without loss, if it was saved in one of them."""

FEW = 64
"""Rows up to which each has the same bits, whatever their number (`native.cpp`)."""

ANY = 1 << 60
PROMPT = 64
"""Rows with which our products race against oneDNN's."""

TURNS = 5
ADVANTAGE = 1.25
"""How many times as fast oneDNN must be at prompts to have them: decoding, which takes longer, is
faster with weights that are laid out for us."""

SAMPLE = 1 << 12
"""Elements of a weight that are tried before all of them."""


class NativeLinear(nn.Module):
    """A linear layer that reads its weight once for a few rows.

    A row of the result has the same bits whatever other rows share the product, up to `FEW`. More
    than ``most`` rows are left to oneDNN, on which processors differ (`lay_out_weights`). A weight
    may be of a narrower type than the activations; sums are in float32 at any rate.
    """

    def __init__(
        self,
        library: Native,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        scale: Tensor | None = None,
        shown_t: bool = False,
        loaded_bytes: int | None = None,
    ) -> None:
        """weight: ``[N, K]``, or a transposed view of such memory (``shown_t``), as GPT-2's; scale:
        float32 ``[N]``, for integers. loaded_bytes: of the weight before it was narrowed."""
        super().__init__()
        self.held = "weight"
        """The name of the parameter that products read."""
        self.weight = weight
        self.bias = bias
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self._shown_t = shown_t
        self.library = library
        self._compilable = opaque("native_linear", _product, _shape)
        self.out_features, self.in_features = self._matrix().shape
        self.loaded_bytes = weight.nbytes if loaded_bytes is None else loaded_bytes
        self.most = ANY
        self._together = Together(library, [self])
        self._onednn = packed.available()

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self._parameters.get("panels") is not None:
            return in_rows(self.panels)
        return super().__getattr__(name)

    @property
    def read(self) -> Tensor:
        """The weight as products read it: ``[N, K]``, or laid out."""
        found: Tensor = self._parameters[self.held]  # type: ignore[assignment]  # faster so
        return found

    @property
    def can_be_laid_out(self) -> bool:
        """Whether a product could read the weights of some outputs together."""
        plain = self.held == "weight" and not self._shown_t
        return plain and self.out_features % self.library.panel == 0

    def lay_out(self) -> None:
        """Keeps the weight in the order in which a product reads it, and only so: ``weight`` is a
        copy from then on."""
        panels = laid_out(self.weight.detach(), self.library.panel)
        self.panels = nn.Parameter(panels, requires_grad=self.weight.requires_grad)
        self.held = "panels"
        del self._parameters["weight"]

    def _matrix(self) -> Tensor:
        return self.weight.t() if self._shown_t else self.weight

    def told(self) -> Weight:
        """Returns what the products read."""
        bias = None if self.bias is None else self.bias.float()
        return Weight(self.read.t() if self._shown_t else self.read, self.scale, bias)

    def pointer(self) -> int:
        """Returns where the weight is now."""
        return self.read.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., K]`` -> ``[..., N]``."""
        if torch.compiler.is_compiling():
            return self._compiled(x)
        if not self._can(x):
            return self.dense(x)
        return self._together.product(self, x)

    def share(self, together: Together) -> None:
        """Computes with others from now on."""
        self._together = together

    def _can(self, x: Tensor) -> bool:
        fits = 0 < x.numel() <= self.most * self.in_features
        return fits and not self._learns(x) and x.device.type == "cpu"

    def _learns(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or self.read.requires_grad)

    def _compiled(self, x: Tensor) -> Tensor:
        y: Tensor = self._compilable(x.float().contiguous(), *self.told())
        return y.to(x.dtype)

    def dense(self, x: Tensor) -> Tensor:
        """Returns the same by torch's products."""
        matrix = self._matrix().to(x.dtype)
        if self.scale is not None:
            matrix = matrix * self.scale[:, None]
        plain = x.dtype == torch.float32 and not self._learns(x)
        if self._onednn and plain and x.numel():
            return packed.product(x, matrix, self.bias)
        return linear(x, matrix, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination.pop(prefix + "panels", None) is not None:
            destination[prefix + "weight"] = self.weight


class Together:
    """Layers that are given the same input one after another: one product does for all.

    The first one that asks computes what the others will ask for. What they get is theirs only if
    their input is the very same tensor; otherwise it is computed for them.
    """

    def __init__(self, library: Native, layers: Sequence[NativeLinear]) -> None:
        self._library = library
        self._layers = tuple(layers)
        self._prepared: Prepared | None = None
        self._held: tuple[Tensor, dict[int, Tensor]] | None = None  # replaced as one: threads

    def product(self, layer: NativeLinear, x: Tensor) -> Tensor:
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

    def _ready(self) -> Prepared:
        found = self._prepared
        if found is None or found.pointers != [layer.pointer() for layer in self._layers]:
            found = self._prepared = Prepared([layer.told() for layer in self._layers])
        return found


def _product(x: Tensor, matrix: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    library = native()
    assert library is not None, "its layers exist"
    return library.products(x, Prepared([Weight(matrix, scale, bias)])).view(*x.shape[:-1], -1)


def _shape(x: Tensor, matrix: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], Weight(matrix, scale, bias).outputs)


# -- making them -------------------------------------------------------------------------------


def native_linear(library: Native, layer: Any) -> NativeLinear:
    """Returns a layer like a plain linear one, with its parameters, or, if its weight loses nothing
    by that, with a narrower one."""
    shown_t = type(layer) is Conv1D
    if shown_t:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    weight, loaded = layer.weight, layer.weight.nbytes
    kind = narrowest(weight, library)
    if kind != weight.dtype:
        weight = nn.Parameter(weight.detach().to(kind), requires_grad=False)
    return NativeLinear(library, weight, layer.bias, shown_t=shown_t, loaded_bytes=loaded)


def native_int8(library: Native, layer: Any) -> NativeLinear:
    """Returns a layer with a plain linear one's weight as 8-bit integers, a scale per output."""
    integers, scale = to_int8(matrix_of(layer))
    weight = nn.Parameter(integers, requires_grad=False)
    # What `Int8Linear` holds, which stands in where there is no compiler: seeded texts go by it.
    loaded = integers.nbytes + scale.nbytes  # the other half of its scales and zero points
    return NativeLinear(library, weight, layer.bias, scale=scale, loaded_bytes=loaded)


def narrowest(weight: Tensor, library: Native) -> torch.dtype:
    """Returns the narrowest type that holds every element of a weight as it is."""
    if weight.dtype != torch.float32:
        return weight.dtype
    some = weight.detach().flatten()[:SAMPLE]
    for dtype in filter(library.takes, NARROW):
        if _fits(some, dtype) and _fits(weight.detach(), dtype):
            return dtype
    return weight.dtype


def _fits(weight: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(weight.to(dtype).to(weight.dtype), weight)


@torch.no_grad()
def lay_out_weights(model: nn.Module) -> int:
    """Lays out the weights of a model for our products, but for those that others read too;
    returns of how many layers.

    Where oneDNN is much faster at a product with many rows, float32 weights stay as they are, and
    such products are its.
    """
    layers = [module for module in model.modules() if isinstance(module, NativeLinear)]
    wide = [layer for layer in layers if layer.read.dtype == torch.float32]
    if wide and not _wins_with_many_rows(wide[0]):
        for layer in wide:
            layer.most = FEW
        layers = [layer for layer in layers if layer.most > FEW]
    readers = Counter(id(own) for each in model.modules() for own in each._parameters.values())
    found = [layer for layer in layers if layer.can_be_laid_out and readers[id(layer.read)] == 1]
    for layer in found:
        layer.lay_out()
    return len(found)


def _wins_with_many_rows(layer: NativeLinear) -> bool:
    """Whether our product is not much slower than oneDNN's at a prompt."""
    ours = NativeLinear(layer.library, nn.Parameter(layer.read, requires_grad=False), None)
    if ours.can_be_laid_out:
        ours.lay_out()
    x = torch.ones(PROMPT, layer.in_features)
    lanes: dict[Callable[[Tensor], Tensor], list[float]] = {ours: [], layer.dense: []}
    for _ in range(1 + TURNS):
        for lane, took in lanes.items():
            begin = perf_counter()
            lane(x)
            took.append(perf_counter() - begin)
    mine, onednns = map(min, lanes.values())  # what else runs only adds to the best turn
    return mine <= ADVANTAGE * onednns


@torch.inference_mode()
def share_products(model: nn.Module) -> int:
    """Lets layers that a pass gives the very same input compute together; returns how many do.

    Which ones do shows in a pass over one token. model: a causal LM.
    """
    calls: list[tuple[NativeLinear, Tensor, Tensor]] = []

    def note(layer: Any, given: tuple[Tensor, ...]) -> None:
        calls.append((layer, given[0], given[0].clone()))

    layers = [module for module in model.modules() if isinstance(module, NativeLinear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        if layers:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(id(layer) for layer, _, _ in calls)
    by_input: dict[Any, list[tuple[NativeLinear, Tensor]]] = defaultdict(list)
    for layer, x, copy in calls:
        if times[id(layer)] == 1:
            by_input[id(x), layer.read.dtype].append((layer, copy))
    shared = 0
    for group in by_input.values():
        unchanged = all(torch.equal(copy, group[0][1]) for _, copy in group)
        if len(group) > 1 and unchanged:
            together = Together(group[0][0].library, [layer for layer, _ in group])
            for layer, _ in group:
                layer.share(together)
            shared += len(group)
    return shared
