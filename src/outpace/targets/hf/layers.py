"""The decoder layers of a transformers model, and changes to them that last for one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import UnsupportedModel
from outpace.targets.base import SubLayers

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
"""What transformers' models call the two parts of a decoder layer."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers in order; ``UnsupportedModel`` where they cannot be told."""
    loaded: Any = model
    count = loaded.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModel(
        f"{type(model).__name__} does not keep its decoder layers in one list: layers of it cannot "
        "be left out or entered."
    )


@contextmanager
def skipping(model: nn.Module, skipped: SubLayers) -> Iterator[None]:
    """Leaves out parts of layers while the block runs: they add nothing to the residual stream."""
    layers = decoder_layers(model)
    with ExitStack() as stack:
        for number in skipped.attention | skipped.mlp:
            layer = layers[number]
            # Code of ours that stands for a whole layer reads the weights and would not notice.
            stack.enter_context(_own_code(layer))
            if number in skipped.attention:
                stack.enter_context(_forward(_part(layer, ATTENTION), _no_attention))
            if number in skipped.mlp:
                stack.enter_context(_forward(_part(layer, MLP), _nothing))
        yield


@contextmanager
def joining(model: nn.Module, layer: int, embeddings: Tensor) -> Iterator[None]:
    """Puts embeddings ``[B, R, H]`` in the place of the last R columns that a layer is given."""

    def exchange(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        states = args[0] if args else options["hidden_states"]
        columns = states.shape[1] - embeddings.shape[1]
        joined = torch.cat([states[:, :columns], embeddings.to(states)], 1)
        return ((joined, *args[1:]), options) if args else ((), options | {"hidden_states": joined})

    hook = decoder_layers(model)[layer].register_forward_pre_hook(exchange, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _part(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name, part in layer.named_children():
        if name in names:
            return part
    raise UnsupportedModel(
        f"{type(layer).__name__} has no part called {' or '.join(names)}: it cannot be left out."
    )


def _no_attention(hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _nothing(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.zeros_like(hidden_states)


@contextmanager
def _own_code(layer: Any) -> Iterator[None]:
    with _forward(layer, getattr(layer.forward, "plain", layer.forward)):
        yield


@contextmanager
def _forward(module: Any, forward: Any) -> Iterator[None]:
    """Exchanges the ``forward`` of a module while the block runs."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
