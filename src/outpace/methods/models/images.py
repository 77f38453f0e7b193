"""A draft model's access to the images of prompts.

Gagrani et al. 2024, "On Speculative Decoding for Multimodal Large Language Models" (arXiv
2404.08856): a drafter with an image adapter of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from outpace.core.request import MultiModalInputs, MultiModalPrompt
from outpace.errors import ConfigError, OutpaceError, PromptError
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.vision.processor import mark_of, prepare_alike, prepared
from outpace.targets.hf.vision.prompt import ImagePrompt, read_prompt

REMEDY = "give the text and its images to LLM, or set 'images' of the drafter to false"


@dataclass(eq=False)
class DraftImagePrompt:
    """A prompt with images in a draft model's own tokens; several rows may have the same."""

    token_ids: Sequence[int]
    """With the model's own placeholders."""
    tokens: int
    """How many of the target's tokens it stands for."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the model is called with besides token ids."""
    error: OutpaceError | None = None
    """Why it cannot be shown."""
    _read: ImagePrompt | None = None

    def read(self, model: nn.Module) -> ImagePrompt:
        """Returns what the model makes of it, which is made once; raises an ``OutpaceError`` where
        it cannot be made."""
        if self.error is not None:
            raise self.error
        if self._read is None:
            self._read = read_prompt(model, self.token_ids, self.inputs)
        return self._read


class ImageAccess:
    """What one draft model is shown of the images of prompts that were prepared for its target.

    Where both models have the same placeholders and processors that do the same, it reads the very
    tokens and pixels of the target. A model with another processor is given the text and its images
    through this one, with as many placeholders as it needs itself.
    """

    def __init__(
        self, target: LoadedModel, drafter: LoadedModel, wanted: object, same_tokens: bool = True
    ) -> None:
        """wanted: the option ``images``. same_tokens: whether the two have the same tokens. Raises
        ``ConfigError`` where images have to be shown and cannot."""
        self._target, self._drafter = target, drafter
        self.own_placeholders = drafter.placeholders
        same = same_tokens and drafter.placeholders == target.placeholders
        shares = same and prepare_alike(target.processor, drafter.processor)
        sees = wanted is not False and bool(drafter.placeholders and target.placeholders)
        self._shares = sees and shares
        self.prepares = sees and not shares and drafter.processor is not None
        """Whether it wants images as they were given."""
        self.required = wanted is True
        """Whether a prompt whose images it cannot be shown is refused, and not drafted for by its
        text alone."""
        if self.required and not (self._shares or self.prepares):
            raise ConfigError(self._why_not())
        self.hidden = frozenset() if self._shares else target.placeholders
        """Tokens of the target that are left out of texts."""

    def of(
        self, token_ids: Sequence[int], media: MultiModalInputs | None
    ) -> DraftImagePrompt | None:
        """Returns the prompt that a text begins with as the model is shown it; None where there is
        nothing to see, or where it is not shown.

        token_ids: the target's, of prompt and text.
        """
        if media is None or not (self._shares or self.prepares):
            return None
        begun = token_ids[: media.tokens]
        if self._shares:
            return self._checked(self._shared(begun, media))
        if self._target.placeholders.isdisjoint(begun):
            return None
        try:
            return self._checked(self._prepared(media))
        except PromptError as error:
            return self._refused(DraftImagePrompt((), media.tokens), error)

    def _shared(self, token_ids: Sequence[int], media: MultiModalInputs) -> DraftImagePrompt:
        """The target's own tokens and pixels, without tokens that the model does not have."""
        model: Any = self._drafter.model
        names = inspect.signature(model.forward).parameters
        size = int(self._drafter.config.vocab_size)
        kept = [place for place, token in enumerate(token_ids) if token < size]
        inputs = media.inputs if media.pixels is None else media.pixels
        known = {name: value for name, value in inputs.items() if name in names}
        if len(kept) < len(token_ids):
            known = {name: _some(value, len(token_ids), kept) for name, value in known.items()}
        return DraftImagePrompt([token_ids[place] for place in kept], media.tokens, known)

    def _prepared(self, media: MultiModalInputs) -> DraftImagePrompt:
        """What the model's own processor makes of text and images; ``PromptError`` where it makes
        nothing, or is given only what another one has made."""
        given = media.given
        if given is None:
            raise PromptError(
                f"{self._drafter.name} has another processor than {self._target.name}, and what "
                f"the latter has made of this prompt's images is of no use to it: {REMEDY}."
            )
        mark, own = mark_of(self._target.processor), mark_of(self._drafter.processor)
        text = given.text if None in (mark, own) else given.text.replace(str(mark), str(own))
        again = MultiModalPrompt(text, given.images, given.options)
        made = prepared(self._drafter.processor, self._drafter.name, again)
        made.pop("attention_mask", None)
        ids = made.pop("input_ids")[0].tolist()
        return DraftImagePrompt(ids, media.tokens, made)

    def _checked(self, prompt: DraftImagePrompt) -> DraftImagePrompt | None:
        """A prompt, unless nothing of it is left after its last image."""
        ends = not prompt.token_ids or prompt.token_ids[-1] in self.own_placeholders
        if not ends:
            return prompt
        text = f"{self._drafter.name} knows no token after the last image of this prompt: {REMEDY}."
        return self._refused(prompt, PromptError(text))

    def _refused(self, prompt: DraftImagePrompt, error: PromptError) -> DraftImagePrompt | None:
        return replace(prompt, error=error) if self.required else None

    def _why_not(self) -> str:
        target, drafter = self._target, self._drafter
        if not drafter.placeholders or not target.placeholders:
            blind = target if drafter.placeholders else drafter
            return (
                f"'images' is true, and {blind.name} reads text only: leave it out, or use a "
                "vision-language model."
            )
        return (
            f"'images' is true, and {drafter.name} needs a processor of its own for the images of "
            f"prompts that are made for {target.name}: give it as 'processor', or leave 'images' "
            "out."
        )


def _some(value: Any, length: int, kept: Sequence[int]) -> Any:
    """A value without what belongs to tokens that are left out, where it has one for each."""
    by_token = isinstance(value, Tensor) and value.shape[:2] == (1, length)
    return value[:, list(kept)] if by_token else value
