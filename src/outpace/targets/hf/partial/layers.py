"""The decoder layers of a transformers model, and changes to them that last for one pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.base import SubLayers
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.patching import patch_attribute

ATTENTION = ("self_attn", "attn", "attention", "self_attention", "mlstm_layer")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
"""What transformers' models call the two parts of a decoder layer."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers in order; ``UnsupportedModel`` where they cannot be found."""
    loaded: Any = model
    count = loaded.config.get_text_config().num_hidden_layers
    # A vision tower may have as many layers as its language model.
    decoder: Any = loaded.get_decoder() if hasattr(loaded, "get_decoder") else loaded
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModel(
        f"{type(model).__name__} does not keep its decoder layers in one list: layers of it cannot "
        "be left out or entered."
    )


@contextmanager
def skip_sublayers(model: nn.Module, skipped: SubLayers) -> Iterator[None]:
    """Leaves out parts of layers while the block runs: they add nothing to the residual stream.
    Nobody else computes with the model meanwhile."""
    layers = decoder_layers(model)
    with model_lock(model), ExitStack() as stack:
        for number in skipped.attention | skipped.mlp:
            layer = layers[number]
            if number in skipped.complete_layers and (
                _returns_states(layer) or not _has_parts(layer)
            ):
                stack.enter_context(patch_attribute(layer, "forward", _unchanged))
                continue
            if number in skipped.attention:
                stack.enter_context(
                    patch_attribute(_part(layer, ATTENTION), "forward", _no_attention)
                )
            if number in skipped.mlp:
                mlp = _part(layer, MLP)
                pair = "state" in inspect.signature(type(mlp).forward).parameters
                stack.enter_context(
                    patch_attribute(mlp, "forward", _no_attention if pair else _nothing)
                )
        yield


@contextmanager
def capture_states(model: nn.Module, layer: int, seen: list[Tensor], stop: bool) -> Iterator[None]:
    """Puts the hidden states ``[A, T, H]`` that a layer is given into a list while the block runs.
    Nobody else computes with the model meanwhile.

    stop: leave the pass there, and with it the block. Nothing after that layer is computed.
    """

    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append(args[0] if args else options["hidden_states"])
        if stop:
            raise _Reached

    watched = decoder_layers(model)[layer]
    with (
        model_lock(model),
        suppress(_Reached),
        watched.register_forward_pre_hook(note, with_kwargs=True),
    ):
        yield


class _Reached(Exception):
    """The pass has come as far as was wanted."""


@dataclass(frozen=True, eq=False)
class StateInjection:
    """States that join a pass at a layer: it is given them in the place of its last columns."""

    layer: int
    columns: int
    make: Callable[[Tensor], Tensor]
    """From the states of the columns before them, ``[B, T, H]``, to theirs ``[B, columns, H]``."""

    @classmethod
    def of(cls, layer: int, embeddings: Tensor) -> StateInjection:
        """Returns embeddings ``[B, columns, H]`` that join at a layer."""
        return cls(layer, embeddings.shape[1], lambda before: embeddings)

    def __call__(self, states: Tensor) -> Tensor:
        """Returns what the layer is given instead of the states ``[B, T + columns, H]``."""
        before = states[:, : states.shape[1] - self.columns]
        return torch.cat([before, self.make(before).to(states)], 1)


@contextmanager
def inject_states(model: nn.Module, joining: StateInjection) -> Iterator[None]:
    """Lets states join the passes of a model's own code while the block runs. Nobody else computes
    with the model meanwhile."""

    def exchange(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        joined = joining(args[0] if args else options["hidden_states"])
        return ((joined, *args[1:]), options) if args else ((), options | {"hidden_states": joined})

    layer = decoder_layers(model)[joining.layer]
    with model_lock(model), layer.register_forward_pre_hook(exchange, with_kwargs=True):
        yield


def parts_of(model: nn.Module, named: SubLayers) -> list[nn.Module]:
    """Returns the modules of parts of layers; ``UnsupportedModel`` where they cannot be found."""
    layers = decoder_layers(model)
    attention = [_part(layers[number], ATTENTION) for number in sorted(named.attention)]
    return attention + [_part(layers[number], MLP) for number in sorted(named.mlp)]


def _returns_states(layer: nn.Module) -> bool:
    """Whether a layer returns its hidden states alone, as nearly all in transformers do."""
    declared = inspect.signature(type(layer).forward).return_annotation
    return declared in (Tensor, "torch.Tensor", "Tensor")


def _has_parts(layer: nn.Module) -> bool:
    return any(name in (*ATTENTION, *MLP) for name, _ in layer.named_children())


def _part(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name, part in layer.named_children():
        if name in names:
            return part
    raise UnsupportedModel(
        f"{type(layer).__name__} has no part called {' or '.join(names)}, and nothing else in it "
        "can be left out: leave this layer as it is, or draft by another method."
    )


def _unchanged(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    return hidden_states


def _no_attention(hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _nothing(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.zeros_like(hidden_states)


BY_LAYER = (
    "layer_types",
    "attention_layers",
    "mlp_layer_types",
    "no_rope_layers",
    "num_attention_heads_per_layer",
)
"""Entries of a configuration with one value for each layer."""

DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""Entries that say how many layers come before the first one with experts."""


def with_layers(config: Any, count: int, kept: Sequence[int], wanted: int | None = None) -> Any:
    """Returns a configuration with the layers of ``kept``, of a model that has ``count`` of them.
    wanted: how many it has; where these are more, the kinds of ``kept`` come again.

    Raises ``ConfigError`` where the kind of a layer follows from its number, unless ``wanted`` is
    given: then no weights come with the layers.
    """
    found = copy.deepcopy(config)
    found.num_hidden_layers = len(kept) if wanted is None else wanted
    for name in BY_LAYER:
        kinds = getattr(config, name, None)
        if kinds is not None and len(kinds) == count:
            again = [kinds[place] for place in kept]
            kinds = [again[at % len(again)] for at in range(found.num_hidden_layers)]
            _set(found, name, kinds, strict=wanted is None)
    gpt_neo = hasattr(found, "attention_types") and hasattr(found, "attention_layers")
    if gpt_neo:  # which makes the second of the first
        found.attention_types = [[list(found.attention_layers), 1]]
    for name in DENSE_FIRST:
        dense = getattr(config, name, None)
        if dense is not None:
            _set(found, name, sum(place < dense for place in kept), strict=True)
    return found


def _set(config: Any, name: str, value: Any, strict: bool) -> None:
    """Sets an entry. strict: whether one that follows from others has to be this."""
    try:
        setattr(config, name, value)
    except AttributeError:  # a property without a setter
        if strict and getattr(config, name) != value:
            raise ConfigError(
                f"{name} of a {config.model_type} model follows from a layer's number, so that "
                "layers of it are no model of their own: begin with a folder, or with --start "
                "random."
            ) from None
