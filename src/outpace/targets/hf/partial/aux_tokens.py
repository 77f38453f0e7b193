"""Auxiliary tokens: columns in a pass of a causal LM that are never accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.proposal import AuxTokens
from outpace.core.trees.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.masks import MaskMaker, tree_layout
from outpace.targets.hf.partial.layers import StateInjection, inject_states
from outpace.targets.hf.position_patches import PositionPatches
from outpace.targets.hf.recurrent.families import has_recurrent_states


def with_aux_tokens(tree: Tree, aux_tokens: AuxTokens) -> Tree:
    """Returns the tree of the drafted nodes and the auxiliary tokens."""
    return Tree(torch.cat([tree.parents, aux_tokens.parents], 1))


@contextmanager
def aux_inputs(
    model: nn.Module, tokens: Tensor, nodes: int, aux_tokens: AuxTokens
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Sees to it that auxiliary tokens join the pass of the block where they should.

    tokens: ``[B, T]`` before them, the last ``nodes`` of which are the root and the drafted nodes.
    Returns the tokens ``[B, T + R]`` of all columns and further arguments of the model.
    """
    loaded: Any = model
    own = torch.zeros_like(aux_tokens.parents) if aux_tokens.tokens is None else aux_tokens.tokens
    columns, joining = torch.cat([tokens, own], 1), _joining(aux_tokens, nodes)
    if joining is not None and isinstance(model.__dict__.get("forward"), NativeModel):
        yield columns, {"joining": joining}
    elif joining is not None:
        with inject_states(model, joining):
            yield columns, {}
    elif aux_tokens.embeddings is None:
        yield columns, {}
    else:
        embedded = loaded.get_input_embeddings()(tokens)
        yield (
            columns,
            {"inputs_embeds": torch.cat([embedded, aux_tokens.embeddings.to(embedded)], 1)},
        )


def _joining(aux_tokens: AuxTokens, nodes: int) -> StateInjection | None:
    """What joins after the first layer; None where that is nothing."""
    made = aux_tokens.made
    if made is not None:
        here = aux_tokens.parents.device  # and the layer may lie on another device
        return StateInjection(
            aux_tokens.entry_layer,
            aux_tokens.size,
            lambda states: made(states[:, -nodes:].to(here)),
        )
    if aux_tokens.embeddings is None or not aux_tokens.entry_layer:
        return None
    return StateInjection.of(aux_tokens.entry_layer, aux_tokens.embeddings)


class AuxForward:
    """Passes of a model over whole texts with auxiliary tokens, without any cache."""

    def __init__(self, model: nn.Module, max_length: int) -> None:
        """max_length: tokens of a text at most. Raises ``UnsupportedModel`` for a recurrent one."""
        loaded: Any = model
        if has_recurrent_states(loaded.config):
            raise UnsupportedModel(
                f"{type(model).__name__} keeps a recurrent state, which no mask hides from "
                "auxiliary tokens: use a head that is a network of its own, such as medusa."
            )
        self._model = loaded
        self._mask, self._patches = MaskMaker(model, max_length), PositionPatches(model)
        self._last = max_length - 1

    def __call__(self, tokens: Tensor, aux_tokens: AuxTokens) -> Tensor:
        """Returns what auxiliary tokens say in texts ``[B, T]``, ``[B, R, V]``.

        The auxiliary tokens' parents are numbered as if each text were a chain after its first
        token: 0 is that token, T the first auxiliary token. They are the same in all texts.
        Gradients reach what the auxiliary tokens are made from, and never the model's weights.
        """
        rows, length = tokens.shape
        chain = torch.arange(length - 1, device=tokens.device)[None]
        tree = Tree(torch.cat([chain, aux_tokens.parents[:1]], 1))
        start = torch.zeros(1, dtype=torch.long, device=tokens.device)
        layout = tree_layout(start, 1, tree, length + aux_tokens.size)
        with (
            model_lock(self._model),
            frozen(self._model),
            self._patches.applied(layout.of_rows(rows)),
            aux_inputs(self._model, tokens, length, aux_tokens) as (columns, options),
        ):
            output = self._model(
                input_ids=None if "inputs_embeds" in options else columns,
                position_ids=layout.positions.clamp(max=self._last).expand(rows, -1),
                attention_mask=self._mask(layout),
                use_cache=False,
                logits_to_keep=aux_tokens.size,
                **options,
            )
        logits: Tensor = output.logits
        return logits[:, -aux_tokens.size :]  # some models give the logits of all columns


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Keeps gradients of what is computed in the block from the model's weights."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)
