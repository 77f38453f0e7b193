"""Texts with images become prompts, by the processor of a vision-language model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace import chats
from outpace.chats import Conversation
from outpace.errors import PromptError
from outpace.images import opened
from outpace.targets.base import Illustrated, Media
from outpace.targets.hf.kinds import placeholders
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.plain import reads_forward
from outpace.targets.hf.tokenizer import SharedTokenizer
from outpace.targets.hf.vision.processor import mark_of, prepared

_MARK = "a text to look for"

MOST_TOGETHER = 200_000_000
"""Pixels of all images of a prompt."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a chat template writes it."""

    text: str
    images: Sequence[Any]
    special: bool
    """Whether the tokenizer has to add its special tokens: the template has not begun the text."""


class Processed(dict[str, Any]):
    """What a processor made of a text and its images, and these themselves.

    ends: of a conversation, the tokens that end an answer to it.
    """

    def __init__(
        self, made: Mapping[str, Any], given: Illustrated, ends: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(made)
        self.given = given
        self.ends = ends


class Pictures:
    """Makes prompts with images for one loaded model, and refuses those that cannot be.

    shared: the model's tokenizer, which `rendered` uses, too: its lock has to be held for that.
    """

    def __init__(self, loaded: Loaded, shared: SharedTokenizer) -> None:
        self._loaded, self._shared = loaded, shared
        model: Any = loaded.model
        self._placeholders = placeholders(model.config)
        self._arguments = set(inspect.signature(model.forward).parameters)
        self._both_ways = not reads_forward(model)
        self.keeps_images = False
        """Whether a drafter wants images as they were given."""

    def media(
        self,
        ids: Sequence[int],
        inputs: Mapping[str, Any],
        pixels: Mapping[str, Any] | None = None,
        given: Illustrated | None = None,
    ) -> Media | None:
        """Returns what comes with a prompt as the target takes it, None for nothing.

        inputs: what the processor made of the prompt's images; pixels, given: as in `Media`. Raises
        ``PromptError`` for a prompt with places for images that come without any, or for images
        without places.
        """
        self._check(ids, inputs)
        if not (inputs or self._both_ways):
            return None
        # Where a prompt is read both ways it has to be said how far it goes.
        return Media(inputs, len(ids), pixels, given if self.keeps_images else None)

    def _check(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> None:
        name, places = self._loaded.name, not self._placeholders.isdisjoint(ids)
        # transformers' generate has turned pixels into features already.
        shows = any(key.startswith(("pixel_values", "mm_encoder_outputs")) for key in inputs)
        if inputs and not self._placeholders:
            raise PromptError(
                f"{name} reads text only: leave out {sorted(inputs)}, or use a vision-language "
                "model."
            )
        unknown = sorted(set(inputs) - self._arguments)
        if unknown:
            raise PromptError(
                f"{name} takes no {unknown} with a prompt: give what its own processor returns."
            )
        if places and not shows:
            raise PromptError(
                "the prompt has a place for an image, and no image came with it: give one as "
                "'images', or take the place out."
            )
        if shows and not places:
            raise PromptError(
                f"the prompt has no place for its images: write {self._place()} where each of them "
                "belongs."
            )
        if places and ids[-1] in self._placeholders:
            raise PromptError("the prompt ends with an image: put some text behind it.")

    def processed(
        self, text: str, images: Sequence[Any], files: bool = True, **options: Any
    ) -> Processed:
        """Returns what the processor makes of a text and its images: a prompt.

        files: whether images may be files. options: the processor's. Raises ``PromptError`` where
        there is no processor, or it cannot.
        """
        self._needs_processor()
        return self.prompt(text, self.decoded(images, files), **options)

    def decoded(self, images: Sequence[Any], files: bool = True) -> list[Any]:
        """Returns images as processors take them; ``PromptError`` for what is none, and for more
        pixels than a prompt may have. files: whether images may be files."""
        found: list[Any] = []
        pixels = 0
        for image in images:
            found.append(opened(image, files))
            size = getattr(found[-1], "size", None)
            pixels += math.prod(size) if isinstance(size, tuple) else 0  # arrays are there already
            if pixels > MOST_TOGETHER:
                raise PromptError(
                    f"the first {len(found)} images of the prompt have {pixels:,} pixels, and "
                    f"{MOST_TOGETHER:,} are the most: give fewer, or make them smaller."
                )
        return found

    def prompt(self, text: str, pixels: Sequence[Any], **options: Any) -> Processed:
        """Returns what the processor makes of a text and its images, which are `decoded`."""
        whole = self._needs_processor()
        self._check_count(text, len(pixels))
        given = Illustrated(text, list(pixels), options)
        with self._shared.processor(whole) as processor:
            return Processed(prepared(processor, self._loaded.name, given), given)

    def rendered(self, messages: Conversation, **for_template: Any) -> Rendered:
        """Returns what the chat template makes of a conversation.

        for_template: what else the template is given; its text, as ``chat_template``, comes before
        the model's own.
        """
        loaded, processor = self._loaded, self._needs_processor()
        own = getattr(processor, "chat_template", None) or loaded.tokenizer.chat_template
        template = for_template.pop("chat_template", None) or own
        place = None if self._takes_parts(template) else self._place()
        read, images = chats.illustrated(messages, place)
        text = chats.applied(
            loaded.tokenizer, loaded.name, read, **for_template, chat_template=template
        )
        # As transformers' own apply_chat_template does.
        start = getattr(loaded.tokenizer, "bos_token", None)
        begun = start is not None and text.startswith(start)
        return Rendered(text, images, not begun)

    # -- inside --------------------------------------------------------------------------------

    def _needs_processor(self) -> Any:
        if not self._placeholders:
            raise PromptError(
                f"{self._loaded.name} reads text only: leave out the images, or use a "
                "vision-language model."
            )
        if self._loaded.processor is None:
            raise PromptError(
                f"{self._loaded.name} came without a processor, which prompts with images need: "
                "pass processor=, or give what the processor returns."
            )
        return self._loaded.processor

    def _place(self) -> str:
        """What stands for an image in a text."""
        return mark_of(self._loaded.processor) or "the model's image token"

    def _check_count(self, text: str, images: int) -> None:
        """Raises ``PromptError`` for a text with some places, but not as many as images.

        Without any, the processor decides: some put images before the text.
        """
        place = self._place()
        places = text.count(place)
        if places and places != images:
            raise PromptError(
                f"images wanted by the prompt ({place!r}): {places}, images that came with it: "
                f"{images}; give one image for each place."
            )

    def _takes_parts(self, template: str | None) -> bool:
        """Whether a chat template reads contents that are lists of parts, and not texts only."""
        if template is None:
            return False
        parts = [{"role": "user", "content": [{"type": "text", "text": _MARK}]}]
        try:
            text = chats.applied(
                self._loaded.tokenizer, self._loaded.name, parts, chat_template=template
            )
        except PromptError:
            return False
        return _MARK in text and "'text'" not in text
