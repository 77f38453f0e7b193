"""Single decoder layers of the Llama kind, computed by our own code.

In transformers a layer launches some forty small operations besides its products, and launching
them takes longer than computing them. So a layer of the common kind (RMS norms, rotary attention, a
gated SiLU) is computed by `native.cpp` instead, in one call. A token's hidden state then has the
same bits whatever else is in the pass, drafted tokens included. Long prompts, and layers of other
kinds, are left to transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.passes import Angles, PassDescriptions, PassInputs
from outpace.targets.cpu.native_layers.product import NativeProduct
from outpace.targets.cpu.native_layers.stack import (
    HEAD_NORMS,
    NORMS,
    PARTS,
    LayerStack,
    can_run,
    eps_of,
)
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.runner import Runner

CHILDREN = {"self_attn", "mlp", *NORMS}
"""The parts of such a layer: one with others computes something else."""

MOST_EACH = 64
"""Query heads that may share a key head."""

TOLERANCE = 5e-4
"""Largest error that a trial allows, as a share of what the layer adds to the residual stream.
Rounding of float32 is some 3e-6 of that, and 1.1e-4 in the worst number of a layer of Qwen2.5 0.5B
with weights of 8 bits, whose largest numbers are twelve times the usual ones."""

COARSE = 0.05
"""The same where activations are rounded to 8 bits, for the root of the mean square: a last bit may
decide which way one of them is rounded. Layers that compute something else are off by more."""

ROUNDING = 1e-6
"""The same, as a share of the residual stream itself."""


class SharedPasses:
    """The description of the current pass, which all layers of a model share.

    It holds pointers into this process: copies and pickles begin with a new one.
    """

    def __init__(self) -> None:
        self.descriptions = PassDescriptions()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPasses, ()


class NativeLayer:
    """Computes one decoder layer: takes the place of that layer's ``forward``."""

    def __init__(self, library: Native, layer: nn.Module, passes: SharedPasses) -> None:
        """layer: one that looks `_like_llama`. passes: those of the same model."""
        self._library = library
        self._layer = layer
        self._passes = passes
        self.inside = [module for module in layer.modules() if module is not layer]
        """The modules whose weights the library reads."""
        self._unchanged = Unchanged([layer, *self.inside], self.inside)
        self._made: LayerStack | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: no pointers of this process."""
        return {**self.__dict__, "_made": None}

    @property
    def _stack(self) -> LayerStack:
        if self._made is None:
            self._made = LayerStack(self._library, [self._layer], self._passes.descriptions)
        return self._made

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Returns the layer's output ``[A, T, hidden]``."""
        mask = options.get("attention_mask")
        cached = isinstance(options.get("past_key_values"), SlotCache) and not args
        boolean = mask is None or mask.dtype == torch.bool
        if not (cached and boolean and self._can_run(hidden_states)):
            return self.plain(hidden_states, *args, **options)
        return self.compute(hidden_states, **options)

    def _can_run(self, hidden_states: Tensor) -> bool:
        """Whether the library can compute the layer, and nobody has changed or hooked it."""
        if torch.compiler.is_compiling() or not self._unchanged:
            return False
        return can_run(hidden_states, self._stack.most) and not self._stack.is_watched_inside

    def plain(self, *args: Any, **options: Any) -> Any:
        """Returns the output of transformers' own code for the layer."""
        forward: Any = type(self._layer).forward  # the layer's own attribute may be this object
        return forward(self._layer, *args, **options)

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: SlotCache,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns the same, computed by the library."""
        y = hidden_states.clone(memory_format=torch.contiguous_format)
        angles, slots = Angles(*position_embeddings), past_key_values.slots
        self._stack.run(PassInputs(y, angles, past_key_values, slots, attention_mask))
        return y


# -- which layers ------------------------------------------------------------------------------


@torch.inference_mode()
def use_native_layers(model: nn.Module) -> int:
    """Lets the library compute the layers of a causal LM; returns how many it computes.

    Each candidate is computed in both ways in a pass over a small draft. It stays with the library
    only if the numbers agree.
    """
    library = native()
    device: Any = model.device
    if library is None or device.type != "cpu":
        return 0
    passes = SharedPasses()
    trials = [
        _Trial(NativeLayer(library, layer, passes), layer)
        for layer in model.modules()
        if _like_llama(layer, library)
    ]
    if not trials:
        return 0
    try:
        for trial in trials:
            trial.layer.forward = trial
        small_draft(model)
    finally:
        for trial in trials:
            del trial.layer.forward
    for trial in trials:
        if trial.same:
            trial.layer.forward = trial.block
    return sum(trial.same for trial in trials)


def leave_native_layers(model: nn.Module) -> None:
    """Gives all layers of a model back to transformers."""
    for layer in model.modules():
        if isinstance(layer.__dict__.get("forward"), NativeLayer):
            del layer.forward


class _Trial:
    """Computes a layer in both ways and compares the results."""

    def __init__(self, block: NativeLayer, layer: Any) -> None:
        self.block = block
        self.layer = layer
        self._agreed: list[bool] = []  # of each pass

    @property
    def same(self) -> bool:
        """Whether it was computed at least once, and always with the same result."""
        return bool(self._agreed) and all(self._agreed)

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        cached = isinstance(options.get("past_key_values"), SlotCache) and not args
        masked = options.get("attention_mask") is not None
        if not (cached and masked and can_run(hidden_states)):
            return self.block.plain(hidden_states, *args, **options)
        found = self.block.compute(hidden_states, **options)
        expected = self.block.plain(hidden_states, *args, **options)
        if isinstance(expected, Tensor):
            added, rounding = expected - hidden_states, ROUNDING * hidden_states.abs().max()
            self._agreed.append(agree(found, expected, added, self.layer, float(rounding)))
        return expected


def agree(
    found: Tensor, expected: Tensor, added: Tensor, module: nn.Module, rounding: float = 0.0
) -> bool:
    """Returns whether a layer or a model computes the same in two ways.

    added: what it adds to what it is given, by which differences are judged; rounding: the largest
    that is allowed besides.
    """
    off, spread = found - expected, added.std()
    if any(isinstance(each, NativeBlockLinear) for each in module.modules()):
        return bool(off.square().mean().sqrt() <= COARSE * spread)
    return bool(off.abs().max() <= TOLERANCE * spread + rounding)


def small_draft(model: nn.Module) -> Tensor:
    """Returns the logits ``[2, 5, V]`` of a pass over two rows with a draft tree."""
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    runner = Runner(model, rows=2, max_length=32)
    runner.admit(2)
    runner.prefill(0, [[token % vocabulary for token in row] for row in ((3, 1, 4), (1, 5, 9))])
    runner.lengths = [3, 2]
    tokens = torch.tensor([[2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]) % vocabulary
    logits: Tensor = runner.forward(tokens, keep=5, tree=Tree.uniform([0, 0, 1, 2], rows=2)).logits
    return logits


def _like_llama(layer: Any, library: Native) -> bool:
    """Whether a layer may be of the Llama kind. Only a trial can show that it is."""
    if {name for name, _ in layer.named_children()} != CHILDREN or "forward" in layer.__dict__:
        return False
    modules = dict(layer.named_modules())
    known = {"", "self_attn", "mlp", "mlp.act_fn", *PARTS, *NORMS, *HEAD_NORMS}
    if not {*PARTS, *NORMS} <= modules.keys() <= known or any(
        any(hooks_of(module)) for module in modules.values()
    ):
        return False
    linears: list[Any] = [modules[name] for name in PARTS]
    norms = [modules[name] for name in (*NORMS, *HEAD_NORMS) if name in modules]
    if not all(map(_takes, linears)) or {len(list(norm.parameters())) for norm in norms} != {1}:
        return False
    return _fits(layer, linears, norms, library)


def _fits(layer: Any, linears: Sequence[Any], norms: Sequence[Any], library: Native) -> bool:
    """Whether the library can compute a layer of these sizes and dtypes."""
    attention = layer.self_attn
    dim = getattr(attention, "head_dim", 0)
    if _grows(attention):
        return False
    if not dim or getattr(attention, "scaling", None) is None or None in map(eps_of, norms):
        return False
    query, key, hidden = linears[0].out_features, linears[1].out_features, linears[0].in_features
    inner = linears[4].out_features
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    return (
        shapes == _llamas_shapes(query, key, hidden, inner)
        and all(size % library.lanes == 0 for size in (dim, hidden, inner))
        and len(set(map(eps_of, norms))) == 1
        and {norm.weight.dtype for norm in norms} == {torch.float32}
        and [len(norm.weight) for norm in norms] in ([hidden] * 2, [hidden] * 2 + [dim] * 2)
        and key % dim == 0
        and query % key == 0
        and query // key <= MOST_EACH
    )


def _grows(attention: Any) -> bool:
    """Whether queries grow with their position, as those of Ministral 3 do from a position on that
    lies after all those of a trial."""
    config = getattr(attention, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return bool(rope.get("llama_4_scaling_beta"))


def _llamas_shapes(query: int, key: int, hidden: int, inner: int) -> list[tuple[int, int]]:
    """Returns outputs and inputs of each of `PARTS` in a layer whose queries, and keys, are so wide
    together. The library makes room for these, and for nothing wider."""
    attention = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


def _takes(linear: Any) -> bool:
    if type(linear) is nn.Linear:
        return linear.weight.dtype == torch.float32 and linear.weight.is_contiguous()
    return isinstance(linear, NativeProduct) and linear.as_weight().matrix.is_contiguous()


class Unchanged:
    """The children and the ``forward`` of some modules, as they were when this was made.

    Our own code reads the weights of a layer's modules itself. It would not notice that somebody
    has put another module in the place of one (an adapter, a quantised layer), or another function
    in the place of one's ``forward``.
    """

    def __init__(self, parents: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        """parents: those whose children stay; modules: those that keep their ``forward``."""
        self._parents = [parent for parent in parents if parent._modules]
        self._modules = list(modules)
        self._children_then = self._children()
        self._forwards_then = self._forwards()

    def __bool__(self) -> bool:
        """Whether they still are as they were. It is asked in each pass, and takes some
        microseconds for a model."""
        return self._children_then == self._children() and self._forwards_then == self._forwards()

    def _children(self) -> list[Any]:
        return list(chain.from_iterable(module._modules.values() for module in self._parents))

    def _forwards(self) -> list[Any]:
        """The ``forward`` of each module that has one of its own; None for others."""
        return [module.__dict__.get("forward") for module in self._modules]
