"""A causal LM of the Llama kind in one call, from its embeddings to its last norm.

Between two decoder layers, and around all of them, transformers does what a library for training,
quantising and inspecting models has to do. Where all layers are played by `native.cpp`, a pass over
a few tokens spends a noticeable part of its time there, a small drafter's most of all. That is left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.targets.cpu.layer_stack import LayerStack, PassDescriptions, eps_of, few
from outpace.targets.cpu.layers import hooks_of
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layer import TOLERANCE, NativeLayer, small_draft
from outpace.targets.cpu.rotary import Rotary
from outpace.targets.hf.cache import SlotCache

CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""All that such a model consists of, besides its head."""


class Scored(NamedTuple):
    """What a pass is made for; transformers' own outputs take as long as a layer of a small
    drafter."""

    logits: Tensor  # [A, keep, V]


class NativeModel:
    """Plays a causal LM: the ``forward`` of that model, in the place of its own."""

    def __init__(self, library: Native, model: nn.Module) -> None:
        """model: one that looks `_like_llama`."""
        whole: Any = model
        self.plain: Any = whole.forward
        self._inner = whole.model
        self._embed = whole.model.embed_tokens
        self._rotary = Rotary(whole.model.rotary_emb)
        self._head = whole.lm_head
        self._layers: list[Any] = list(whole.model.layers)
        self._blocks: list[NativeLayer] = [layer.forward for layer in self._layers]
        self._stack = LayerStack(
            library, self._layers, PassDescriptions(), whole.model.norm, self._head
        )
        self._modules = whole._modules

    def __call__(
        self,
        input_ids: Tensor | None = None,
        position_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **rest: Any,
    ) -> Any:
        """Returns the model's output, with logits ``[A, keep, V]``."""
        asked = rest or not use_cache or input_ids is None or position_ids is None
        if asked or not self._plays(input_ids, attention_mask, past_key_values):
            return self.plain(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **rest,
            )
        x = self._embed(input_ids)
        told = self._rotary(x, position_ids, past_key_values.longest), past_key_values
        if isinstance(logits_to_keep, int) and self._stack.has_head:
            keep = logits_to_keep or x.shape[1]
            return Scored(self._stack.logits(x, *told, attention_mask, keep))
        self._stack.run(x, *told, attention_mask)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return Scored(self._head(x[:, kept]))

    def _plays(self, tokens: Any, mask: Any, cache: Any) -> bool:
        boolean = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)
        plain = tokens.device.type == "cpu" and not torch.is_grad_enabled() and few(tokens)
        return boolean and plain and isinstance(cache, SlotCache) and self._is_as_it_was()

    def _is_as_it_was(self) -> bool:
        """Whether nobody took layers out since, put others in, or wants to look on."""
        layers = list(self._inner.layers._modules.values())
        return (
            len(layers) == len(self._layers)
            and self._modules["lm_head"] is self._head
            and not any(hooks_of(self._inner))
            and not self._stack.watched
            and all(
                layer is own and layer.__dict__.get("forward") is block
                for layer, own, block in zip(layers, self._layers, self._blocks, strict=True)
            )
        )


@torch.inference_mode()
def use_native_model(model: nn.Module) -> bool:
    """Lets the library play a causal LM whose layers it plays, if the logits of a small draft are
    the same then; returns whether."""
    library = native()
    if library is None or not _like_llama(model):
        return False
    whole: Any = model
    expected = small_draft(model)
    whole.forward = NativeModel(library, model)
    found = small_draft(model)
    if bool((found - expected).abs().max() <= TOLERANCE * expected.std()):
        return True
    del whole.forward
    return False


def _like_llama(model: Any) -> bool:
    """Whether a model looks as if it were of the kind; that it is, only a trial tells."""
    if {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return False
    inner = model.model
    if {name for name, _ in inner.named_children()} != CHILDREN:
        return False
    layers: Sequence[Any] = list(inner.layers)
    if not layers or not all(isinstance(layer.forward, NativeLayer) for layer in layers):
        return False
    heads = {(layer.self_attn.head_dim, layer.self_attn.k_proj.out_features) for layer in layers}
    eps = {eps_of(inner.norm), eps_of(layers[0].input_layernorm)}
    weights = [weight.dtype for weight in (inner.embed_tokens.weight, *inner.norm.parameters())]
    return len(heads) == len(eps) == 1 and set(weights) == {torch.float32}
