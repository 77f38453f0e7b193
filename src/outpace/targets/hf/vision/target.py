"""A target that is a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from outpace.core.transfer import to_device
from outpace.errors import UnsupportedModel
from outpace.targets.base import Media, PromptInputs, ReadPart, Target
from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.runner import PREFILL_CHUNK
from outpace.targets.hf.supported.plainly import reads_forward
from outpace.targets.hf.target import HFTarget, asking_for, states_of
from outpace.targets.hf.vision.families import IDENTICAL
from outpace.targets.hf.vision.prompt import ImagePrompt
from outpace.targets.hf.vision.reading import read_prompt
from outpace.targets.hf.vision.tokens import placeholders
from outpace.targets.hf.vision.trial import try_images


class VisionTarget(HFTarget):
    """Rows of a vision-language model, some of whose prompts have images.

    Images are looked at when a row is admitted, and what the model makes of the prompt is read in
    pieces, one row after the other. From then on such a row is like any other, but that its
    positions may be other numbers than its tokens have.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        max_length: int,
        fixed: FixedShapes | None = None,
        saved_texts: int = 0,
        saved_tokens: int | None = None,
    ) -> None:
        super().__init__(model, rows, max_length, fixed, saved_texts, saved_tokens)
        self._unread: list[ImagePrompt | None] = []  # by row, until all of it is read
        self._placeholders = placeholders(self.model.config)
        self._tried = self.model.config.model_type in IDENTICAL
        self._reads_forward = reads_forward(model)

    # -- rows ----------------------------------------------------------------------------------

    def admit(self, inputs: PromptInputs) -> int:
        if inputs.media is None and not self._reads_forward:
            raise UnsupportedModel(
                f"{type(self.model).__name__} reads prompts both ways, and nothing says where this "
                "one ends: generate with LLM."
            )
        images = None if inputs.media is None else self._looked_at(inputs, inputs.media)
        reuse = inputs.reuse and images is None
        row = super().admit(PromptInputs(inputs.token_ids, reuse))
        self._unread.append(images)
        if images is not None:
            self.runner.offsets[row] = images.offset
        return row

    def _looked_at(self, inputs: PromptInputs, media: Media) -> ImagePrompt:
        """What the model makes of a prompt with images."""
        shown = inputs.token_ids[: media.tokens]
        if not self._tried:
            try_images(self.model, shown, media.inputs)
            self._tried = True
        return read_prompt(self.model, shown, media.inputs)

    def fork(self, row: int, whole: bool = False) -> int:
        self._unread.append(None)  # the row has been read
        return super().fork(row, whole)

    def reset(self) -> None:
        super().reset()
        self._unread = []

    def retain(self, rows: Sequence[int], texts: Mapping[int, Sequence[int]] | None = None) -> None:
        # Another text with the same placeholders may show other images.
        plain = {
            row: text for row, text in (texts or {}).items() if self._placeholders.isdisjoint(text)
        }
        super().retain(rows, plain)
        self._unread = [self._unread[row] for row in rows]

    def plain(self, token_ids: Sequence[int], last: int | None = None) -> Tensor:
        # Where a prompt is read both ways no single pass over prompt and text gives its
        # distributions.
        return super().plain(token_ids, last) if self._reads_forward else Target.plain(self, ())

    def another(self, rows: int) -> VisionTarget:
        return VisionTarget(self.model, rows, self.max_length)

    # -- prompts -------------------------------------------------------------------------------

    def _fit_the_first_pass(self, token_budget: int) -> bool:
        return not any(self._unread) and super()._fit_the_first_pass(token_budget)

    def _reads_alone(self, row: int) -> bool:
        return self._unread[row] is not None

    def _read_some(self, budget: int, layers: frozenset[int]) -> ReadPart:
        images = self._unread[self._ready]
        if images is None:
            return super()._read_some(budget, layers)
        return self._read_images(images, budget, layers)

    def _read_images(self, images: ImagePrompt, budget: int, layers: frozenset[int]) -> ReadPart:
        """Reads the next piece of a prompt with images."""
        row, prompt = self._ready, self._prompts[self._ready]
        begin, last = self.runner.lengths[row], len(prompt) - 1
        end = images.end(begin, min(budget, PREFILL_CHUNK), last)
        columns = to_device([list(prompt[begin:end])], self.device)
        options: dict[str, Any] = {**asking_for(layers), "through": images.piece(begin, end)}
        output = self.runner.forward(columns, keep=1, first=row, **options)
        # The last token of a prompt is read with those that see it. It is the root of the first
        # round all the same, which writes it to its slot once more as it is.
        known = list(prompt[begin : min(end, last)])
        self.runner.lengths[row] += len(known)
        if end >= min(last, len(images)):
            self._unread[row] = None
        return ReadPart([row], [known], states_of(output, layers, len(known)))
