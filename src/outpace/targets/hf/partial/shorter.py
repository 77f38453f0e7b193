"""The configuration of a model with some of the layers of another one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


def with_layers(config: Any, count: int, kept: Sequence[int], wanted: int | None = None) -> Any:
    """Returns a configuration with the layers of ``kept``, of a model that has ``count`` of them.
    wanted: how many it has; where these are more, the kinds of ``kept`` come again."""
    found = copy.deepcopy(config)
    found.num_hidden_layers = len(kept) if wanted is None else wanted
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(kinds) == count:
        again = [kinds[place] for place in kept]
        found.layer_types = [again[at % len(again)] for at in range(found.num_hidden_layers)]
    return found
