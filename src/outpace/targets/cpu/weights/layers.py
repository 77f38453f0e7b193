"""The plain linear layers of a model, those that another kind of layer may replace, and layers that
hold their weight in another form than they show it in.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

READ = frozenset({"dt_proj"})
"""Layers that are no layers to their model's code, which multiplies by their weight itself: Mamba's
step sizes."""


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns each plain linear layer of a model as its parent and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Subclasses and hooked modules do more than a product.
        if type(child) in (nn.Linear, Conv1D) and not any(hooks_of(child)) and name not in READ
    ]


def dtype_sensitive_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns those whose weight's dtype the model's own code asks for, to convert their input to
    it (the heads of Mamba and xLSTM): there a narrower weight would round the input too."""
    found = linear_layers(model)
    # Each class once: to find its code in a file takes as long as a small model's whole layer.
    sources = {kind: _source(kind) for kind in {type(parent) for parent, _ in found}}
    return [
        (parent, name)
        for parent, name in found
        if f"self.{name}.weight.dtype" in sources[type(parent)]
    ]


def _source(kind: type[nn.Module]) -> str:
    """The code of a module's forward pass; nothing where there is no file of it."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Returns where a module keeps the hooks around its forward pass: empty unless there are some,
    and the same dictionaries for as long as the module lives."""
    return [module._forward_hooks, module._forward_pre_hooks]


def replace_modules(
    places: Sequence[tuple[nn.Module, str]], make: Callable[[Any], nn.Module | None]
) -> int:
    """Puts what ``make`` returns in the place of each layer, unless it returns None; returns how
    many layers were replaced. places: of the layers, as `linear_layers` returns them.

    A layer that stands in two places is replaced by one. Each layer is released once it is
    replaced, so that a model is never held twice.
    """
    by_layer: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent, name in places:
        by_layer[id(getattr(parent, name))].append((parent, name))
    return sum(_replace(found, make) for found in by_layer.values())


def _replace(
    places: Sequence[tuple[nn.Module, str]], make: Callable[[Any], nn.Module | None]
) -> bool:
    parent, name = places[0]
    layer: Any = getattr(parent, name)
    made = make(layer)
    if made is None:
        return False
    made.train(layer.training)
    for parent, name in places:
        setattr(parent, name, made)
    return True


def matrix_of(layer: Any) -> Tensor:
    """Returns a layer's weight ``[N, K]``, contiguous."""
    weight: Tensor = layer.weight.detach()
    return weight.t().contiguous() if type(layer) is Conv1D else weight


# -- layers that hold their weight in another form -------------------------------------------------


class OnDemandWeight(nn.Module):
    """A layer whose ``weight`` is made anew at each look; ``state_dict`` holds it, too, as that of
    the layer that this one stands for does."""

    @property
    def weight(self) -> Tensor:
        """The plain weight: a copy."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class PrepackedModule(nn.Module):
    """A layer whose weight lies in an order that only one kind of product reads, and that can be
    neither copied nor written. Copies and pickles hold the plain weight, and lay it out again."""

    OF_PROCESS = ("_packed", "_compilable")
    """Attributes that mean something in this process only."""

    def prepack(self, plain: Tensor) -> None:
        """Sets `OF_PROCESS` from a weight as `plain` returns it, which is not kept."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """Returns what the weight was laid out from: a copy."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in self.OF_PROCESS}
        return {**kept, "plain_weight": self.plain()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        plain = kept.pop("plain_weight")
        super().__setstate__(kept)  # type: ignore[no-untyped-call]
        self.prepack(plain)
