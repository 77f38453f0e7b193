"""Single decoder layers, computed by our own code.

In transformers a layer launches some forty small operations besides its products, and launching
them takes longer than computing them. So a layer that can be described (`description`) is computed
by `native.cpp` instead, in one call. A token's hidden state then has the same bits whatever else is
in the pass, drafted tokens included. Long prompts, and layers of other kinds, are left to
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.describing import description_of
from outpace.targets.cpu.native_layers.description import LayerDescription
from outpace.targets.cpu.native_layers.fitting import check_lanes
from outpace.targets.cpu.native_layers.passes import Angles, PassDescriptions, PassInputs, seen_by
from outpace.targets.cpu.native_layers.stack import LayerStack, can_run
from outpace.targets.cpu.weights.experts import BlockExperts
from outpace.targets.hf.cache import SlotCache, find_cache
from outpace.targets.hf.masks import WINDOW, with_span
from outpace.targets.hf.recurrent.history import StateName
from outpace.targets.hf.recurrent.states import StateCache
from outpace.targets.hf.recurrent.steps import StepwiseForward
from outpace.targets.hf.runner import Runner

TOLERANCE = 5e-4
"""Largest error that a trial allows, as a share of what the layer adds to the residual stream.
Rounding of float32 is some 3e-6 of that, and 1.1e-4 in the worst number of a layer of Qwen2.5 0.5B
with weights of 8 bits, whose largest numbers are twelve times the usual ones."""

COARSE = 0.05
"""The same where activations are rounded to 8 bits, for the root of the mean square: a last bit may
decide which way one of them is rounded. Layers that compute something else are off by more."""

MOST_TOKENS = 0.8
"""Share of the tokens that have to agree where a mixture follows such rounding: one of two experts
with nearly equal scores is another one then."""

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

    def __init__(
        self, library: Native, description: LayerDescription, passes: SharedPasses
    ) -> None:
        """passes: those of the same model."""
        self._library, self._lanes = library, library.lanes
        self.description = description
        self._layer = layer = description.layer
        self._passes = passes
        self.inside = [module for module in layer.modules() if module is not layer]
        """All modules within the layer."""
        self._unchanged = ModuleGuard([layer, *self.inside], self.inside)
        self._made: LayerStack | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: no pointers of this process."""
        return {**self.__dict__, "_made": None}

    @property
    def _stack(self) -> LayerStack:
        if self._made is None:
            layers, passes = [self.description], self._passes.descriptions
            check_lanes(layers, self._library, self._lanes)
            self._made = LayerStack(self._library, layers, passes)
        return self._made

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Returns the layer's output ``[A, T, hidden]``."""
        cached = isinstance(find_cache(options), SlotCache) and not args
        rotates = (
            not self.description.knows_positions or options.get("position_embeddings") is not None
        )
        if not (cached and rotates and self._can_run(hidden_states)):
            return self.plain(hidden_states, *args, **options)
        return self.compute(hidden_states, **options)

    def _can_run(self, hidden_states: Tensor) -> bool:
        """Whether the library can compute the layer, and nobody has changed or hooked it."""
        if self._layer.training or torch.compiler.is_compiling() or not self._unchanged:
            return False  # a layer that is trained drops numbers out
        return can_run(hidden_states, self._stack.most) and not self._stack.has_inner_hooks

    def plain(self, *args: Any, **options: Any) -> Any:
        """Returns the output of transformers' own code for the layer."""
        forward: Any = type(self._layer).forward  # the layer's own attribute may be this object
        return forward(self._layer, *args, **options)

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the same, computed by the library."""
        cache = find_cache(options)
        y = hidden_states.clone(memory_format=torch.contiguous_format)
        angles = () if position_embeddings is None else (Angles.of(position_embeddings),)
        masks = (seen_by(attention_mask),)
        self._stack.run(PassInputs(y, angles, cache, cache.slots, masks))
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
    found = (description_of(module, library) for module in model.modules())
    kept = _agreeing(model, library, [list(each.candidates()) for each in found if each])
    capped = [each for each in kept if each.softcap]
    if capped:
        with _scores_beyond_caps(capped) as grown:
            bounded = _agreeing(model, library, [[each] for each in grown])
        layers = [each.layer for each in bounded]
        kept = [each for each in kept if not each.softcap or each.layer in layers]
    passes = SharedPasses()
    for each in kept:
        each.layer.forward = NativeLayer(library, each, passes)
    return len(kept)


def _agreeing(
    model: nn.Module, library: Native, candidates: Sequence[Sequence[LayerDescription]]
) -> list[LayerDescription]:
    """Returns those candidates that give their layers' numbers in a small draft: one of each layer
    at most."""
    passes = SharedPasses()
    trials = [_Trial(library, each, passes) for each in candidates]
    if not trials:
        return []
    try:
        for trial in trials:
            trial.layer.forward = trial
        small_draft(model)
    finally:
        for trial in trials:
            del trial.layer.forward
    found = (trial.agreed for trial in trials)
    return [description for description in found if description is not None]


GROWN = 100.0
"""By which the scores of a trial are multiplied, so that a soft bound of theirs is felt."""


@contextmanager
def _scores_beyond_caps(capped: Sequence[LayerDescription]) -> Iterator[list[LayerDescription]]:
    """Lets the scores of some layers grow while the block runs; yields their descriptions as they
    are then."""
    try:
        for each in capped:
            each.attention.scaling = each.scaling * GROWN
        yield [replace(each, scaling=each.scaling * GROWN) for each in capped]
    finally:
        for each in capped:
            each.attention.scaling = each.scaling


def leave_native_layers(model: nn.Module) -> None:
    """Gives all layers of a model back to transformers."""
    for layer in model.modules():
        if isinstance(layer.__dict__.get("forward"), NativeLayer):
            del layer.forward


class _Trial:
    """Computes a layer in its own code and by each candidate, and compares."""

    def __init__(
        self, library: Native, candidates: Sequence[LayerDescription], passes: SharedPasses
    ) -> None:
        """candidates: descriptions of one layer."""
        self.layer = candidates[0].layer
        self._candidates = candidates
        self._left = [NativeLayer(library, each, passes) for each in candidates]
        """Those that have agreed so far."""
        self._off: dict[int, float] = {}
        """How far each of these was off, by its number, when it was computed last."""

    @property
    def agreed(self) -> LayerDescription | None:
        """The candidate that was the nearest of those that always agreed."""
        if not self._off:
            return None
        left = [block for block in self._left if id(block) in self._off]
        return min(left, key=lambda block: self._off[id(block)]).description if left else None

    def _tries(self, hidden_states: Tensor, args: Any, options: dict[str, Any]) -> bool:
        """Whether a pass is the one over drafts, and can be computed."""
        cache = find_cache(options)
        if args or not can_run(hidden_states):
            return False
        recurrence = self._candidates[0].recurrence
        if recurrence is None:
            return isinstance(cache, SlotCache) and options.get("attention_mask") is not None
        drafted = isinstance(cache, StateCache) and hidden_states.shape[1] == 1 + len(DRAFT)
        layer = recurrence.module.layer_idx
        return drafted and all(
            cache.holds(StateName(layer, kind, 0), shape)
            for kind, shape in recurrence.states.items()
        )

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        plain: Any = type(self.layer).forward
        if not self._tries(hidden_states, args, options):
            return plain(self.layer, hidden_states, *args, **options)
        if options.get("position_embeddings") is None:
            self._left = [each for each in self._left if not each.description.knows_positions]
        found = [block.compute(hidden_states, **options) for block in self._left]
        expected = plain(self.layer, hidden_states, *args, **options)
        if isinstance(expected, Tensor):
            added, rounding = expected - hidden_states, ROUNDING * hidden_states.abs().max()
            self._off = {
                id(block): float((states - expected).square().mean())
                for block, states in zip(self._left, found, strict=True)
                if agree(states, expected, added, self.layer, float(rounding))
            }
            self._left = [block for block in self._left if id(block) in self._off]
        return expected


def agree(
    found: Tensor, expected: Tensor, added: Tensor, module: nn.Module, rounding: float = 0.0
) -> bool:
    """Returns whether a layer or a model computes the same in two ways.

    added: what it adds to what it is given, by which differences are judged; rounding: the largest
    that is allowed besides.
    """
    off, spread = found - expected, added.std()
    if any(isinstance(each, BlockExperts) for each in module.modules()):
        by_token = off.square().mean(-1).sqrt() <= COARSE * spread
        return float(by_token.float().mean()) >= MOST_TOKENS
    if any(isinstance(each, NativeBlockLinear) for each in module.modules()):
        return bool(off.square().mean().sqrt() <= COARSE * spread)
    return bool(off.abs().max() <= TOLERANCE * spread + rounding)


SMALL_WINDOW = 3
"""The window of layers that have one, so that a small draft is longer."""


DRAFT = [0, 0, 1, 2]
"""The parents of its nodes."""


def small_draft(model: nn.Module) -> Tensor:
    """Returns the logits ``[2, 5, V]`` of a pass over two rows with a draft tree."""
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    with with_span(model, WINDOW, SMALL_WINDOW):
        runner = Runner(model, rows=2, max_length=32)
        runner.admit(2)
        prompts = ((3, 1, 4), (1, 5, 9))
        runner.prefill(0, [[token % vocabulary for token in row] for row in prompts])
        runner.lengths = [3, 2]
        tokens = torch.tensor([[2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]) % vocabulary
        tree = Tree.uniform(DRAFT, rows=2)
        logits: Tensor = runner.forward(tokens, keep=5, tree=tree).logits
        return logits


class _Dictionaries(NamedTuple):
    """The children of some modules, and the attributes of others."""

    of_parents: list[dict[str, Any]]
    of_modules: list[dict[str, Any]]


class ModuleGuard:
    """The children and the ``forward`` of some modules, as they were when this was made.

    Our own code reads the weights of a layer's modules itself. It would not notice that somebody
    has put another module in the place of one (an adapter, a quantised layer), or another function
    in the place of one's ``forward``.
    """

    def __init__(self, parents: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        """parents: those whose children stay; modules: those that keep their ``forward``."""
        self._parents = [parent for parent in parents if parent._modules]
        self._modules = list(modules)
        self._dictionaries: _Dictionaries | None = None
        self._children_then = self._children()
        self._forwards_then = self._forwards()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: a copy looks into its own modules, once they have
        their attributes."""
        return {**self.__dict__, "_dictionaries": None}

    def __bool__(self) -> bool:
        """Whether they still are as they were. It is asked in each pass, and takes some
        microseconds for a model."""
        return self._children_then == self._children() and self._same_forwards()

    def _children(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._found().of_parents)))

    def _forwards(self) -> list[Any]:
        """The ``forward`` of each module that has one of its own; None for others."""
        return [attributes.get("forward") for attributes in self._found().of_modules]

    def _found(self) -> _Dictionaries:
        """Where modules have their children and attributes: asking each takes longer."""
        if self._dictionaries is None:
            children = [parent._modules for parent in self._parents]
            attributes = [module.__dict__ for module in self._modules]
            self._dictionaries = _Dictionaries(children, attributes)
        return self._dictionaries

    def _same_forwards(self) -> bool:
        found = self._forwards()
        if found == self._forwards_then:
            return True
        # One that reads columns one by one stands there for a pass, and changes no number.
        own = [each.own if type(each) is StepwiseForward else each for each in found]
        return own == self._forwards_then
