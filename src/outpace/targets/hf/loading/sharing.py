"""Layers of Gemma 4 that have no keys and values of their own, as its assistants are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sharing_layers(given: Mapping[str, Any]) -> Any:
    """Returns transformers' model of a text configuration, whose layers attend to what it is given
    as ``shared_kv_states``. Raises ``ValueError`` for parts that such a model does not have, and
    ``ImportError`` where transformers has no Gemma 4."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    class Sharing(Gemma4TextConfig):  # type: ignore[no-untyped-call]
        """transformers 5.23 refuses to say it of models without a layer that computes some."""

        @property
        def kv_sharing_modes(self) -> list[str | None]:
            return ["reuse"] * self.num_hidden_layers

    config: Any = Sharing(**{**given, "num_kv_shared_layers": given["num_hidden_layers"]})
    config._attn_implementation = "sdpa"
    for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if getattr(config, name):
            raise ValueError(f"its {name} is {getattr(config, name)!r}, and none is known")
    model: Any = Gemma4TextModel(config)
    # Else transformers drops columns before the first layer that shares, and stumbles over several.
    model.first_kv_shared_layer_idx = -1
    return model
