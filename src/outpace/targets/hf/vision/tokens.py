"""The tokens of a model that stand for images."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


def placeholders(config: Any) -> frozenset[int]:
    """Returns the token ids in whose place a model puts what it has seen; none for a model that
    reads text only."""
    if getattr(config, "vision_config", None) is None:
        return frozenset()
    found = (getattr(config, name, None) for name in _NAMES)
    return frozenset(token for token in found if isinstance(token, int))
