"""Reads prompts with images into the rows of a runner."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.transfer import to_device
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.vision.prompt import ImagePrompt


def feed(
    runner: Runner, row: int, prompt: ImagePrompt, token_ids: Sequence[int], needed: int
) -> None:
    """Caches the first ``needed`` tokens of a prompt with images, from where the row ends, and
    commits them. Tokens that are read with them, because they see each other, do not count.

    token_ids: of the prompt, at least those that are needed.
    """
    runner.offsets[row] = prompt.offset
    while (begin := runner.lengths[row]) < needed:
        end = prompt.end(begin, PREFILL_CHUNK, needed)
        ids = to_device([list(token_ids[begin:end])], runner.device)
        runner.forward(ids, keep=1, first=row, through=prompt.piece(begin, end))
        runner.lengths[row] = min(end, needed)
