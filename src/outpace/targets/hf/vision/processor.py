"""Processors: what makes a vision-language model's inputs of texts and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto import processing_auto
from transformers.utils import import_utils

from outpace.core.request import MultiModalPrompt
from outpace.core.values import shown
from outpace.errors import ConfigError, ModelLoadError, PromptError, reason_of
from outpace.targets.hf.kinds import INSTALLED, older_than, placeholders

FILES = ("processor_config.json", "preprocessor_config.json")


def check_processor(processor: Any) -> None:
    """Raises ``ConfigError`` for what a caller gives as a processor and is none."""
    whole = hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")
    if processor is not None and not (callable(processor) and whole):
        raise ConfigError(
            f"processor must be a loaded processor of texts and images, not {shown(processor)}: "
            "load it with transformers.AutoProcessor.from_pretrained()."
        )


def read_processor(source: str, name: str, config: Any, trust: bool) -> Any:
    """Returns the processor that comes with a vision-language model, None if there is none, or the
    model reads text only.

    source: a folder or hub name. name: what the model is called in errors. Raises
    ``ModelLoadError`` for a processor that cannot be read.
    """
    if not placeholders(config):
        return None
    try:
        processor = _read(source, config, trust)
    except Exception as error:  # transformers raises all sorts over the files of others
        if not any((Path(source) / file).exists() for file in FILES) or _needs_pillow(error):
            return None  # prompts then cannot have images, and the engine says so
        if isinstance(error, ImportError) and older_than("5.18"):  # later ones do without it
            raise ModelLoadError(
                f"the processor of {name!r} needs torchvision with transformers "
                f"{INSTALLED}: install torchvision, or transformers 5.18 or later."
            ) from error
        raise ModelLoadError(
            f"cannot read the processor of {name!r} ({reason_of(error, named=True)}): download or "
            "save the model again."
        ) from error
    return processor if hasattr(processor, "image_processor") else None


def _read(source: str, config: Any, trust: bool) -> Any:
    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    kind: Any = getattr(transformers, names.get(config.model_type, ""), None)
    complete = import_utils.is_torchvision_available()
    if kind is None or complete or "video_processor" not in kind.get_attributes():
        auto: Any = AutoProcessor
        return auto.from_pretrained(source, trust_remote_code=trust)
    return _without_videos(kind).from_pretrained(source)


def _without_videos(kind: Any) -> Any:
    """Returns a kind of processor that reads no videos: those who do need torchvision."""
    readers: dict[str, Any] = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}

    class WithoutVideos(kind):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(
            cls, source: str, processor_dict: Any = None, **options: Any
        ) -> list[Any]:
            kinds = [readers.get(name) for name in cls.get_attributes()]
            return [None if part is None else part.from_pretrained(source) for part in kinds]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(name, argument)

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos


def mark_of(processor: Any) -> str | None:
    """Returns what stands for an image in the texts that a processor is given, None if it does not
    say."""
    found = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    return None if found is None else str(found)


def prepared(processor: Any, name: str, given: MultiModalPrompt) -> dict[str, Any]:
    """Returns what a processor makes of a text and its images, as tensors of one row.

    name: what the model is called in errors. Raises ``PromptError`` where the processor refuses.
    """
    images = list(given.images) or None
    try:
        made = processor(text=[given.text], images=images, return_tensors="pt", **given.options)
    except Exception as error:  # a processor is a program of the model's
        raise PromptError(
            f"the processor of {name} refuses this prompt ({reason_of(error)}): check its text and "
            "its images."
        ) from error
    return dict(made)


def prepare_alike(one: Any, other: Any) -> bool:
    """Returns whether two processors make the same of every image, as far as they say: the same
    pixels and as many tokens. One that is not known is taken to be like the other."""
    return None in (one, other) or _said(one) == _said(other)


def _said(processor: Any) -> dict[str, Any]:
    """What a processor says of itself that bears on images."""
    said = dict(processor.to_dict())
    return {name: said[name] for name in said.keys() - {"chat_template", "tokenizer"}}


def _needs_pillow(error: Exception) -> bool:
    return isinstance(error, ImportError) and "PIL" in str(error)
