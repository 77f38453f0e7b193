"""The tokens of a model that stand for images."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

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


def sees_images(config: Any) -> bool:
    """Returns whether a saved model is a vision-language model, and not the language model of one,
    by the class that it was saved from."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or not placeholders(config):
        return False
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    saved = getattr(config, "architectures", None) or [kind.__name__]
    return kind.__name__ in saved
