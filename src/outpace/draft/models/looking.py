"""The rows of a draft model as far as their prompts show images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outpace.core.faults import RowFault
from outpace.draft.base import RowInfo
from outpace.draft.models.own_text import OwnText, ShownText
from outpace.draft.models.sight import REMEDY, ShownPrompt, Sight
from outpace.draft.remembered import Remembered
from outpace.errors import PromptError, UnsupportedModel
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.vision.images import feed


class Looking:
    """What each row is shown, and how far that is read.

    A row that cannot be shown its images, or whose text has outgrown the model's context, goes on
    as if it had none: its text is read anew, without the tokens that stand for them.
    """

    def __init__(self, sight: Sight, runner: Runner) -> None:
        self._sight, self._runner = sight, runner
        self._prompts: list[ShownPrompt | None] = []  # by row
        self._texts: list[OwnText] = []  # by row
        self._closed = Remembered(bool)  # by row: whether it is shown no images any more

    def begin(self, info: RowInfo, text: Callable[[bool], OwnText]) -> OwnText:
        """Adds a row and returns its text as the model reads it.

        text: makes the text of the target's tokens, told whether these go on after a prompt that
        is shown.
        """
        row, twin = len(self._prompts), info.forked_from
        self._closed.admit([info])
        prompt = None if twin is None else self._prompts[twin]
        prompt = prompt or self._sight.of(info.prompt, info.media)
        if prompt is None:
            found = text(False)
        else:
            found = ShownText(prompt.token_ids, prompt.tokens, text(True))
            if self._closed[row]:
                found.hide(self._sight.own_placeholders)
                prompt = None
        self._prompts.append(prompt)
        self._texts.append(found)
        return found

    def alike(self, row: int, other: int) -> bool:
        """Whether two rows with the same prompt are shown the same of it."""
        return (self._prompts[row] is None) == (self._prompts[other] is None)

    def shows(self, row: int) -> bool:
        """Whether a row is shown images."""
        return self._prompts[row] is not None

    def look(self, row: int, length: int) -> bool:
        """Feeds what a row is shown, as far as that is not cached and its text of ``length`` own
        tokens needs it but for the last one. Returns False if it cannot be fed and has been closed.

        Raises `RowFault` instead where images have to be shown.
        """
        prompt = self._prompts[row]
        if prompt is None:
            return True
        needed = min(len(prompt.token_ids), length - 1)
        if self._runner.lengths[row] >= needed and prompt.error is None:
            return True
        try:
            images = prompt.read(self._runner.model)
        except (PromptError, UnsupportedModel) as error:
            if self._sight.required:
                reason = str(error).partition(": give")[0].rstrip(".")
                raise RowFault(
                    row, f"the drafter cannot be shown this prompt's images ({reason}): {REMEDY}."
                ) from error
            self.close(row)
            return False
        feed(self._runner, row, images, prompt.token_ids, needed)
        return True

    def close(self, row: int) -> bool:
        """Shows a row no images any more, and forgets what is cached of it; returns whether it was
        shown any."""
        text = self._texts[row]
        if self._prompts[row] is None or not isinstance(text, ShownText):
            return False
        text.hide(self._sight.own_placeholders)
        self._prompts[row], self._closed[row] = None, True
        self._runner.lengths[row], self._runner.offsets[row] = 0, self._runner.text_offset
        return True

    def retain(self, rows: Sequence[int]) -> None:
        """Keeps these rows, as `Drafter.retain` does."""
        self._prompts = [self._prompts[row] for row in rows]
        self._texts = [self._texts[row] for row in rows]
        self._closed.retain(rows)
