"""A causal LM of the Llama kind computed in one call, from its embeddings to its logits.

Around its layers transformers does what a library for training, quantising and inspecting models
has to do. Once `native.cpp` computes the layers, that takes a noticeable part of a pass over a few
tokens, most of all in a small drafter. So it is left out where all layers are computed by our own
code and nobody looks on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.base import SubLayers
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.layer import NativeLayer, Unchanged, agree, small_draft
from outpace.targets.cpu.native_layers.passes import PassDescriptions, PassInputs, Rotary
from outpace.targets.cpu.native_layers.stack import LayerStack, eps_of, few
from outpace.targets.cpu.weights.blocks import embedding_dtype
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.logits import PassOutput, VocabularySubset
from outpace.targets.hf.partial.layers import Joining, changing

CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""The parts of such a model besides its head: one with others computes something else."""


class NativeModel:
    """Computes a causal LM: takes the place of that model's ``forward``."""

    def __init__(self, library: Native, model: nn.Module) -> None:
        """model: one that looks `_like_llama`."""
        whole: Any = model
        self._model = whole
        self._inner = whole.model
        self._embed = whole.model.embed_tokens
        self._rotary = Rotary(whole.model.rotary_emb)
        self._head = whole.lm_head
        self._layers: list[Any] = list(whole.model.layers)
        self._library = library
        inside = [module for layer in self._layers for module in layer.forward.inside]
        beside = [self._inner, *whole.model.children(), self._head]
        parents = [whole, self._inner, whole.model.layers, *self._layers, *inside]
        self._unchanged = Unchanged(parents, [*beside, *self._layers, *inside])
        self._made: LayerStack | None = None
        self._made_halves: dict[int, tuple[LayerStack, LayerStack]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles hold: no pointers of this process."""
        return {**self.__dict__, "_made": None, "_made_halves": {}}

    @property
    def supports_partial_logits(self) -> bool:
        """Whether a pass is shorter where logits are needed of a part of the vocabulary."""
        return self._is_as_it_was() and self._stack.has_head

    @property
    def rounds_inputs(self) -> bool:
        """Whether its products round what they multiply. Then only passes of its own agree to the
        last bit: sums in another order now and then decide how a number is rounded."""
        return any(isinstance(module, NativeBlockLinear) for module in self._model.modules())

    @property
    def tokens_alike(self) -> int:
        """Up to how many tokens in a pass it gives each token the same bits, however many they are
        and however they branch. 0 where the model is not as it was, so that others compute it."""
        return self._stack.most if self._is_as_it_was() else 0

    @property
    def _stack(self) -> LayerStack:
        if self._made is None:
            passes, norm = PassDescriptions(), self._inner.norm
            self._made = LayerStack(self._library, self._layers, passes, norm, self._head)
        return self._made

    def _halves(self, layer: int) -> tuple[LayerStack, LayerStack]:
        """The layers before one, and the others with the logits."""
        if layer not in self._made_halves:
            passes, norm = PassDescriptions(), self._inner.norm
            self._made_halves[layer] = (
                LayerStack(self._library, self._layers[:layer], passes),
                LayerStack(self._library, self._layers[layer:], passes, norm, self._head),
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
        joining: Joining | None = None,
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
            with nullcontext() if joining is None else changing(self._model, joining):
                return self.plain(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    use_cache=use_cache,
                    logits_to_keep=logits_to_keep,
                    **rest,
                    **({"output_hidden_states": True} if output_hidden_states else {}),
                    **({} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}),
                )
        if inputs_embeds is None:
            x = self._embed(input_ids)
        else:
            x = inputs_embeds.clone(memory_format=torch.contiguous_format)
        given = self.inputs(x, position_ids, past_key_values, attention_mask)
        if output_hidden_states or joining is not None:
            return self._with_states(given, logits_to_keep, joining, subset)
        return PassOutput(self.logits(self._stack, given, logits_to_keep, subset))

    def _with_states(
        self,
        given: PassInputs,
        keep: int | Tensor,
        joining: Joining | None,
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

    def inputs(
        self, x: Tensor, positions: Tensor, cache: SlotCache, mask: Tensor | None
    ) -> PassInputs:
        """Returns what layers are given of a pass: x ``[A, T, hidden]``, which they replace, at
        positions ``[A, T]``."""
        angles = self._rotary(x, positions, cache.longest)
        return PassInputs(x, angles, cache, cache.slots, mask)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns ``[A, T, hidden]``."""
        found: Tensor = self._embed(tokens)
        return found

    def head(self, states: Tensor) -> Tensor:
        """Returns the logits of what some layers left, ``[A, T, hidden]``, through the norm."""
        found: Tensor = self._head(self._inner.norm(states))
        return found

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
        found: Tensor = self._head(given.x[:, _kept(keep)])
        return found

    def part(self, first: int, last: int | None, skipped: SubLayers) -> NativePart:
        """Returns the layers from ``first`` up to ``last`` (unset: all, and the logits), without
        some of their parts."""
        norm, head = (self._inner.norm, self._head) if last is None else (None, None)
        layers, passes = self._layers[first:last], PassDescriptions()
        stack = LayerStack(self._library, layers, passes, norm, head, skipped)
        return NativePart(self, stack)

    def plain(self, **options: Any) -> Any:
        """Returns the output of transformers' own code for the model."""
        forward: Any = type(self._model).forward  # the model's own attribute may be this object
        return forward(self._model, **options)

    def takes(self, tokens: Any, mask: Any, cache: Any) -> bool:
        """Whether it computes a pass over tokens ``[A, T]``, or embeddings ``[A, T, hidden]``, or
        the model's own code has to."""
        boolean = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)
        plain = (
            tokens.device.type == "cpu"
            and (tokens.dtype == torch.float32 or not tokens.is_floating_point())
            and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        )
        mine = boolean and plain and isinstance(cache, SlotCache) and self._is_as_it_was()
        return mine and few(tokens, self._stack.most)

    def _is_as_it_was(self) -> bool:
        """Whether the model still has the modules that it was loaded with, and no hooks on them."""
        return (
            bool(self._unchanged) and not any(hooks_of(self._inner)) and not self._stack.is_watched
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
        attention_mask: Tensor | None,
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
        attention_mask: Tensor | None,
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
    if library is None or not _like_llama(model):
        return False
    whole: Any = model
    expected = small_draft(model)
    whole.forward = NativeModel(library, model)
    found = small_draft(model)
    if agree(found, expected, expected, model):
        return True
    del whole.forward
    return False


def _like_llama(model: Any) -> bool:
    """Whether a model may be of the Llama kind. Only a trial can show that it is."""
    if {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return False
    if "forward" in model.__dict__:  # somebody else's
        return False
    inner = model.model
    if {name for name, _ in inner.named_children()} != CHILDREN:
        return False
    layers: Sequence[Any] = list(inner.layers)
    if not layers or not all(isinstance(layer.forward, NativeLayer) for layer in layers):
        return False
    heads = {(layer.self_attn.head_dim, layer.self_attn.k_proj.out_features) for layer in layers}
    eps = {eps_of(inner.norm), eps_of(layers[0].input_layernorm)}
    dtypes = {embedding_dtype(inner.embed_tokens), *(w.dtype for w in inner.norm.parameters())}
    return len(heads) == len(eps) == 1 and dtypes == {torch.float32}
