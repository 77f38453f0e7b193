"""Whether a model is a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has_experts(entries: Mapping[str, Any]) -> bool:
    """Returns whether a configuration, or a part of it, counts experts: each family has its own
    name for their number, which ends with this word.

    >>> has_experts({"text_config": {"num_local_experts": 8}})
    True
    """
    for name, value in entries.items():
        if isinstance(value, Mapping) and has_experts(value):
            return True
        if str(name).endswith("experts") and type(value) is int and value > 1:
            return True
    return False
