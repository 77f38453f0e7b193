"""A causal LM computed in one call, from its embeddings to its logits.

Around its layers transformers does what a library for training, quantising and inspecting models
has to do. Once `native.cpp` computes the layers, that takes a noticeable part of a pass over a few
tokens, most of all in a small drafter. So it is left out where all layers are computed by our own
code and nobody looks on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.base import SubLayers
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.description import LayerDescription, kinds_of
from outpace.targets.cpu.native_layers.fitting import check_lanes
from outpace.targets.cpu.native_layers.layer import ModuleGuard, NativeLayer, agree, small_draft
from outpace.targets.cpu.native_layers.passes import (
    PassDescriptions,
    PassInputs,
    rotaries_of,
    seen_by,
)
from outpace.targets.cpu.native_layers.probing import Norm, norm_of
from outpace.targets.cpu.native_layers.stack import LayerStack, ModelHead, few
from outpace.targets.cpu.weights.blocks import embedding_dtype
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.hf.cache import SlotCache, cache_name
from outpace.targets.hf.logits import LogitScaling, PassOutput, VocabularySubset
from outpace.targets.hf.partial.layers import StateInjection, inject_states

NORMS = ("norm", "final_layernorm", "embedding_norm")
ROTARY = ("rotary_emb", "pos_emb")
CHILDREN = {"embed_tokens", "layers"}
"""The parts of such a model besides its head and the norm before that: one with others computes
something else."""


class NativeModel:
    """Computes a causal LM: takes the place of that model's ``forward``."""

    def __init__(self, library: Native, model: nn.Module) -> None:
        """model: one that `_may_be_whole`."""
        whole: Any = model
        self._model = whole
        self._cache_name = cache_name(type(whole).forward)
        self._inner = whole.model
        self._embed = whole.model.embed_tokens
        self._multiplier = float(getattr(whole.model, "embedding_multiplier", 1.0))
        layers: list[Any] = list(whole.model.layers)
        self._kinds = kinds_of(whole.config, len(layers))
        rotary = _rotary_of(whole.model)
        self._rotaries = [] if rotary is None else rotaries_of(rotary, self._kinds)
        self._layers = _of_kinds(layers, whole.config, self._kinds, len(self._rotaries))
        norm = _last_norm(whole.model)
        assert norm is not None
        self._ends = ModelHead(norm, whole.lm_head, LogitScaling.of(whole.config))
        self._library, self._lanes = library, library.lanes
        inside = [module for layer in layers for module in layer.forward.inside]
        beside = [self._inner, *whole.model.children(), whole.lm_head]
        parents = [whole, self._inner, whole.model.layers, *layers, *inside]
        self._unchanged = ModuleGuard(parents, [*beside, *layers, *inside])
        self._made: LayerStack | None = None
        self._made_halves: dict[int, tuple[LayerStack, LayerStack]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: no pointers of this process."""
        return {**self.__dict__, "_made": None, "_made_halves": {}}

    @property
    def supports_partial_logits(self) -> bool:
        """Whether a pass is shorter where logits are needed of a part of the vocabulary."""
        return self._is_unchanged() and self._stack.has_head

    @property
    def quantizes_inputs(self) -> bool:
        """Whether its products round what they multiply. Then only passes of its own agree to the
        last bit: sums in another order now and then decide how a number is rounded."""
        return any(isinstance(module, NativeBlockLinear) for module in self._model.modules())

    @property
    def max_invariant_tokens(self) -> int:
        """Up to how many tokens in a pass it gives each token the same bits, however many they are
        and however they branch. 0 where the model is not as it was, so that others compute it."""
        return self._stack.most if self._is_unchanged() else 0

    @property
    def _stack(self) -> LayerStack:
        if self._made is None:
            check_lanes(self._layers, self._library, self._lanes)
            passes = PassDescriptions()
            self._made = LayerStack(self._library, self._layers, passes, self._ends)
        return self._made

    def _halves(self, layer: int) -> tuple[LayerStack, LayerStack]:
        """The layers before one, and the others with the logits."""
        if layer not in self._made_halves:
            passes = PassDescriptions()
            self._made_halves[layer] = (
                LayerStack(self._library, self._layers[:layer], passes),
                LayerStack(self._library, self._layers[layer:], passes, self._ends),
            )
        return self._made_halves[layer]

    def __call__(
        self,
        input_ids: Tensor | None = None,
        position_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        inputs_embeds: Tensor | None = None,
        joining: StateInjection | None = None,
        subset: VocabularySubset | None = None,
        **rest: Any,
    ) -> Any:
        """Returns the model's output, with logits ``[A, keep, V]``. joining: states that join
        after one of its first layers. subset: the tokens whose logits are needed; unset: all.
        Where only the first ones are, ``[A, keep, V']``, with maybe more of them than asked
        for."""
        read = input_ids if inputs_embeds is None else inputs_embeds
        asked = rest or not use_cache or read is None or position_ids is None
        if asked or not self.takes(read, attention_mask, past_key_values):
            with nullcontext() if joining is None else inject_states(self._model, joining):
                return self.plain(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    attention_mask=attention_mask,
                    use_cache=use_cache,
                    logits_to_keep=logits_to_keep,
                    past_key_values=past_key_values,
                    **rest,
                    **({"output_hidden_states": True} if output_hidden_states else {}),
                    **({} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}),
                )
        if inputs_embeds is None:
            assert input_ids is not None
            x = self.embed(input_ids)
        else:
            x = self._scaled(inputs_embeds.clone(memory_format=torch.contiguous_format))
        given = self.inputs(x, position_ids, past_key_values, attention_mask)
        if output_hidden_states or joining is not None:
            return self._with_states(given, logits_to_keep, joining, subset)
        return PassOutput(self.logits(self._stack, given, logits_to_keep, subset))

    def _with_states(
        self,
        given: PassInputs,
        keep: int | Tensor,
        joining: StateInjection | None,
        subset: VocabularySubset | None,
    ) -> PassOutput:
        """Returns logits, the embeddings and what each layer leaves, with the same bits as in a
        pass that nobody asks for them."""
        x, stack = given.x, self._stack
        embedded = x.clone()
        states = x.new_empty(len(self._layers), *x.shape)  # [layers, A, T, hidden]
        rest = given._replace(states=states)
        if joining is not None:
            before, stack = self._halves(joining.layer)
            if joining.layer:
                before.run(given._replace(states=states[: joining.layer]))
            rest = given._replace(x=joining(x), states=states[joining.layer :])
        return PassOutput(self.logits(stack, rest, keep, subset), (embedded, *states))

    def inputs(self, x: Tensor, positions: Tensor, cache: SlotCache, mask: Any) -> PassInputs:
        """Returns what layers are given of a pass: x ``[A, T, hidden]``, which they replace, at
        positions ``[A, T]``. mask: as the model's ``forward`` takes it."""
        angles = tuple(rotary(x, positions, cache.longest) for rotary in self._rotaries)
        if isinstance(mask, Mapping):
            masks = tuple(seen_by(mask[kind]) for kind in self._kinds)
        else:
            masks = (seen_by(mask),) * max(1, len(self._kinds))
        return PassInputs(x, angles, cache, cache.slots, masks)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns what the first layer is given, ``[A, T, hidden]``."""
        return self._scaled(self._embed(tokens))

    def _scaled(self, embedded: Tensor) -> Tensor:
        return embedded if self._multiplier == 1.0 else embedded * self._multiplier

    def head(self, states: Tensor) -> Tensor:
        """Returns the logits of what some layers left, ``[A, T, hidden]``, through the norm."""
        return self._ends.scaling(self._ends.head(self._ends.norm.module(states)))

    def logits(
        self,
        stack: LayerStack,
        given: PassInputs,
        keep: int | Tensor,
        subset: VocabularySubset | None = None,
    ) -> Tensor:
        """Returns the logits ``[A, keep, V]`` after a stack that ends the model. keep: how many of
        each row's last tokens, 0 for all, or which ones. subset: the tokens whose logits are
        needed; unset: all."""
        if isinstance(keep, int) and stack.has_head:
            return stack.logits(given, keep or given.x.shape[1], subset)
        stack.run(given)
        return self._ends.scaling(self._ends.head(given.x[:, _kept(keep)]))

    def part(self, first: int, last: int | None, skipped: SubLayers) -> NativePart:
        """Returns the layers from ``first`` up to ``last`` (unset: all, and the logits), without
        some of their parts."""
        ends = self._ends if last is None else None
        layers, passes = self._layers[first:last], PassDescriptions()
        return NativePart(self, LayerStack(self._library, layers, passes, ends, skipped))

    def plain(self, past_key_values: Any = None, **options: Any) -> Any:
        """Returns the output of transformers' own code for the model."""
        forward: Any = type(self._model).forward  # the model's own attribute may be this object
        if past_key_values is not None:
            options[self._cache_name] = past_key_values
        return forward(self._model, **options)

    def takes(self, tokens: Any, mask: Any, cache: Any) -> bool:
        """Whether it computes a pass over tokens ``[A, T]``, or embeddings ``[A, T, hidden]``, or
        the model's own code has to."""
        known = not isinstance(mask, Mapping) or (mask.keys() >= {*self._kinds} != set())
        plain = (
            tokens.device.type == "cpu"
            and (tokens.dtype == torch.float32 or not tokens.is_floating_point())
            and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
            and not self._inner.training
        )
        mine = known and plain and isinstance(cache, SlotCache) and self._is_unchanged()
        return mine and few(tokens, self._stack.most)

    def _is_unchanged(self) -> bool:
        """Whether the model still has the modules that it was loaded with, and no hooks on them."""
        return (
            bool(self._unchanged)
            and not any(hooks_of(self._inner))
            and not self._stack.has_foreign_hooks
        )


def _kept(keep: int | Tensor) -> slice | Tensor:
    """The columns whose logits are kept: the last ``keep``, all of them for 0."""
    return slice(-keep, None) if isinstance(keep, int) else keep


class NativePart:
    """Some of the layers of a `NativeModel`, over the same weights and caches.

    Its methods take the arguments of the model's ``forward`` by their names.
    """

    def __init__(self, whole: NativeModel, stack: LayerStack) -> None:
        self._whole, self._stack = whole, stack

    def takes(self, input_ids: Tensor, attention_mask: Any, past_key_values: Any, **_: Any) -> bool:
        """Whether it computes such a pass."""
        return self._whole.takes(input_ids, attention_mask, past_key_values)

    def logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        past_key_values: SlotCache,
        logits_to_keep: int,
        states: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns ``[A, keep, V]``, where the layers are the last ones. states: ``[A, T, hidden]``,
        what the layers before them made of the tokens; unset: there are none."""
        x = self._whole.embed(input_ids) if states is None else states.clone()
        given = self._whole.inputs(x, position_ids, past_key_values, attention_mask)
        return self._whole.logits(self._stack, given, logits_to_keep)

    def states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        past_key_values: SlotCache,
        **_: Any,
    ) -> Tensor:
        """Returns what the layers, which are the first ones, make of the tokens, ``[A, T,
        hidden]``."""
        x = self._whole.embed(input_ids)
        self._stack.run(self._whole.inputs(x, position_ids, past_key_values, attention_mask))
        return x

    def head(self, states: Tensor) -> Tensor:
        """Returns the logits ``[A, T, V]`` of states ``[A, T, hidden]``, through norm and head."""
        return self._whole.head(states)


@torch.inference_mode()
def use_native_model(model: nn.Module) -> bool:
    """Lets the library compute a whole causal LM; returns whether it does.

    It must compute all of its layers already, and give the same logits for a small draft.
    """
    library = native()
    if library is None or not _may_be_whole(model):
        return False
    whole: Any = model
    expected = small_draft(model)
    whole.forward = NativeModel(library, model)
    found = small_draft(model)
    if agree(found, expected, expected, model):
        return True
    del whole.forward
    return False


def _may_be_whole(model: Any) -> bool:
    """Whether the library may compute a whole model. Only a trial can show that it does."""
    if {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return False
    if "forward" in model.__dict__:  # somebody else's
        return False
    inner = model.model
    parts = {name for name, part in inner.named_children() if type(part) is not nn.Dropout}
    if parts - {*NORMS, *ROTARY} != CHILDREN or _last_norm(inner) is None:
        return False
    layers: Sequence[Any] = list(inner.layers)
    if not layers or not all(isinstance(layer.forward, NativeLayer) for layer in layers):
        return False
    rotates = any(layer.forward.description.knows_positions for layer in layers)
    if rotates and _rotary_of(inner) is None:
        return False
    types = getattr(model.config, "layer_types", None)
    listed = types is None or len(types) >= len(layers)
    return listed and embedding_dtype(inner.embed_tokens) == torch.float32


def _rotary_of(inner: nn.Module) -> Any:
    """What makes the angles of heads; None where there is no such part."""
    found = [part for name, part in inner.named_children() if name in ROTARY]
    return found[0] if len(found) == 1 else None


def _last_norm(inner: nn.Module) -> Norm | None:
    """The norm after the last layer."""
    found = [part for name, part in inner.named_children() if name in NORMS]
    return norm_of(found[0]) if len(found) == 1 else None


def _of_kinds(
    layers: Sequence[Any], config: Any, kinds: Mapping[str, int], rotaries: int
) -> list[LayerDescription]:
    """Returns the descriptions of layers, with the numbers of their angles and masks."""
    if not kinds:
        return [layer.forward.description for layer in layers]
    numbers = [kinds[config.layer_types[place]] for place in range(len(layers))]
    return [
        replace(layer.forward.description, mask=number, angles=number if rotaries > 1 else 0)
        for layer, number in zip(layers, numbers, strict=True)
    ]
