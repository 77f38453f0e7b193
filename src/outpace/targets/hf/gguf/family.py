"""The description of a family of GGUF files, and readers of values that several families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outpace.errors import ModelLoadError
from outpace.targets.hf.gguf.file import GGUFModel

Options = dict[str, Any]

SLIDING, FULL = "sliding_attention", "full_attention"

FACTORS = ("logit_scale", "residual_scale", "embedding_scale")
"""Factors of some families, such as Granite, that most do not have: 1 changes nothing, 0 stands for
none."""
ALL_FACTORS = frozenset({*FACTORS, "attention.scale"})


def _as_it_is(model: GGUFModel, options: Options) -> Options:
    return {}


@dataclass(frozen=True)
class Family:
    """How the files of one architecture are read."""

    model_type: str
    """What transformers calls it."""
    layout: Callable[..., Any] | None = None
    """Its weights' layout; None for transformers' own function."""
    further: Callable[[GGUFModel, Options], Options] = _as_it_is
    """Options of the configuration, from the file and the options that all have. It may take some
    of these out."""
    variant: Callable[[GGUFModel], str] | None = None
    """Tells another type of model by a file, where there are several of one architecture."""
    factors: frozenset[str] = frozenset()
    """The factors that its configuration has."""
    table: str | None = None
    """What transformers' table of values calls it, if not by the type; empty for none."""
    lists: tuple[str, ...] = ()
    """Values that may differ from layer to layer. What all families have is read from the first."""
    heads: Callable[[GGUFModel], Options] | None = None
    """Values of its heads, where those in a file are of something else."""

    def settled(self, model: GGUFModel) -> GGUFModel:
        """Returns a model whose every value is one number for all layers, and those of its heads
        what they are in other families."""
        values = dict(model.values)
        own = {} if self.heads is None else self.heads(model)
        values |= {f"{model.architecture}.{name}": value for name, value in own.items()}
        for name in (f"{model.architecture}.{name}" for name in self.lists):
            if isinstance(values.get(name), np.ndarray):
                values[name] = values[name][:1]
        return replace(model, values=values)

    def type_of(self, model: GGUFModel) -> str:
        """Returns what transformers calls the model in a file."""
        return self.model_type if self.variant is None else self.variant(model)


# -- what several families share -------------------------------------------------------------------


def windows(model: GGUFModel, period: int) -> Options:
    """Returns the window of a model and which of its layers have it: those that the file says,
    else all but each ``period``-th."""
    size, count = model.number("attention.sliding_window"), model.number("block_count")
    if not size:
        return {"sliding_window": None, "layer_types": [FULL] * count}
    pattern = model.family_value("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if len(pattern) != count:
            raise ModelLoadError(
                f"{model.path} says of {len(pattern)} layers whether they have a window, and that "
                f"it has {count} layers: download it again."
            )
        slides = [bool(layer) for layer in pattern]
    else:
        period = model.number("attention.sliding_window_pattern") or period
        slides = [(layer + 1) % period != 0 for layer in range(count)]
    types = [SLIDING if sliding else FULL for sliding in slides]
    return {"sliding_window": size, "layer_types": types}


def attended(model: GGUFModel) -> list[bool]:
    """Returns which layers of a model attend: those that have key heads."""
    heads = model.family_value("attention.head_count_kv")
    if isinstance(heads, np.ndarray):
        return [bool(count) for count in heads]
    return [True] * model.number("block_count")


def by_layer(model: GGUFModel, name: str) -> list[Any]:
    """Returns a value of each layer."""
    found, count = model.family_value(name), model.number("block_count")
    values = found.tolist() if isinstance(found, np.ndarray) else [found] * count
    if len(values) != count or not all(values):
        raise ModelLoadError(
            f"{model.path} does not say what the {name} of each layer is: download it again."
        )
    return values


def has(model: GGUFModel, name: str) -> bool:
    """Whether the first layer of a model has such a weight."""
    return f"blk.0.{name}" in model.tensors


def needed(model: GGUFModel, name: str) -> Any:
    """Returns a number that a family's files must have."""
    found = model.number(name)
    if found is None:
        raise ModelLoadError(f"{model.path} does not say what its {name} is: download it again.")
    return found
