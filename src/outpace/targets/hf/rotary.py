"""Scaled rotary positions, as transformers computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outpace.errors import reason_of

KINDS = ("linear", "llama3", "yarn", "proportional")
"""Kinds of scaling that are the same for texts of every length. The others ("dynamic", "longrope")
turn the same position by another angle once a text has become long."""


def with_frequencies(rope: Mapping[str, Any], head_dim: int, longest: int | None) -> dict[str, Any]:
    """Returns a scaled kind of rotary positions with what transformers makes of it: the list
    ``inv_freq`` and the number ``attention_factor``.

    rope: ``rope_type``, ``rope_theta`` and what else the kind takes. longest: the length of text
    that the model is made for, if it is known. Raises ``ValueError`` where entries do not fit, and
    for a kind that depends on the length of a text.
    """
    kind = rope.get("rope_type")
    if kind not in KINDS:
        raise ValueError(f"its rope_type is {kind!r}, and only {['default', *KINDS]} are known")
    try:
        config: Any = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=longest or LlamaConfig().max_position_embeddings,
            rope_parameters=dict(rope),
        )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, None)
    except (
        ArithmeticError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"its rotary positions of the type {kind!r} lack an entry or have one that does not "
            f"fit: {reason_of(error)}"
        ) from error
    found = {**config.rope_parameters, "inv_freq": inv_freq.tolist()}
    return {**found, "attention_factor": float(factor)}
