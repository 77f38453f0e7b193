"""The rows of a draft model as far as their prompts show images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outpace.core.faults import RowFault
from outpace.core.request import PerRequest, Request
from outpace.errors import PromptError, UnsupportedModel
from outpace.methods.models.draft_text import DraftText, ImagePromptText
from outpace.methods.models.images import REMEDY, DraftImagePrompt, ImageAccess
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.vision.images import feed


@dataclass(eq=False)
class ModelRow:
    """One row of a draft model: the text of a request as the model reads it."""

    request: Request
    text: DraftText
    prompt: DraftImagePrompt | None = None
    """What it is shown of the prompt's images."""
    own: list[int] = field(default_factory=list)
    """The text in the model's tokens, or the window of it."""
    begin: int = 0
    """The first token of the text that it reads."""
    keeps: bool = False
    """Whether its cache follows from its tokens alone."""
    can_reuse_prefix: bool = False
    """Whether it may begin with what is cached of another text."""
    cached: list[int] = field(default_factory=list)
    """What its slots hold, of a model with other tokens than the target's."""


class ImageFeeder:
    """Shows rows the images of their prompts.

    A row that cannot be shown its images, or whose text has outgrown the model's context, goes on
    as if it had none: its text is read anew, without the tokens that stand for them.
    """

    def __init__(self, images: ImageAccess, runner: Runner) -> None:
        self._images, self._runner = images, runner
        self._closed = PerRequest(lambda request: False, lasting=True)
        """Whether it is shown no images any more."""

    def begin(
        self, request: Request, parent: ModelRow | None, text: Callable[[bool], DraftText]
    ) -> ModelRow:
        """Returns the row of a request that joins the batch.

        parent: the row that it is copied from, if it is. text: makes the text of the target's
        tokens; its argument says whether these go on after a prompt that is shown.
        """
        prompt = None if parent is None else parent.prompt
        prompt = prompt or self._images.of(request.token_ids, request.media)
        if prompt is None:
            return ModelRow(request, text(False))
        found = ImagePromptText(prompt.token_ids, prompt.tokens, text(True))
        if self._closed[request]:
            found.hide(self._images.own_placeholders)
            prompt = None
        return ModelRow(request, found, prompt)

    def look(self, row: int, of: ModelRow) -> bool:
        """Feeds what a row is shown, as far as that is not cached and its text needs it but for the
        last one. Returns False if it cannot be fed and has been closed.

        Raises `RowFault` instead where images have to be shown.
        """
        prompt = of.prompt
        if prompt is None:
            return True
        needed = min(len(prompt.token_ids), len(of.own) - 1)
        if self._runner.lengths[row] >= needed and prompt.error is None:
            return True
        try:
            images = prompt.read(self._runner.model)
        except (PromptError, UnsupportedModel) as error:
            if self._images.required:
                reason = str(error).partition(": give")[0].rstrip(".")
                raise RowFault(
                    row, f"the drafter cannot be shown this prompt's images ({reason}): {REMEDY}."
                ) from error
            self.close(row, of)
            return False
        feed(self._runner, row, images, prompt.token_ids, needed)
        return True

    def close(self, row: int, of: ModelRow) -> bool:
        """Shows a row no images any more, and forgets what is cached of it; returns whether it was
        shown any."""
        if of.prompt is None or not isinstance(of.text, ImagePromptText):
            return False
        of.text.hide(self._images.own_placeholders)
        of.prompt, self._closed[of.request] = None, True
        self._runner.lengths[row], self._runner.offsets[row] = 0, self._runner.text_offset
        return True
