"""Loads a model with one sign of life instead of the bars of the libraries below."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from outpace.api import LLM
    from outpace.core.params import SamplingParams

ROWS = 16
"""Texts decoded at once, at most."""


def load_llm(
    model: str | None, engine: dict[str, Any], sampling: dict[str, Any], texts: int
) -> tuple[LLM, SamplingParams]:
    """Returns the engine and the checked options; these are checked before anything is loaded.

    texts: how many will be asked for, so that no more rows than these are kept.
    """
    console = Console(stderr=True)
    # A download has its own bar, with bytes and time left; a folder is read in seconds.
    local = model is None or os.path.exists(model)
    text = f"loading {model or 'the bundled pair'}"
    with working(console, text, shown=local) as report:
        from outpace.core.params import SamplingParams

        params = SamplingParams(**sampling)
        from outpace.api import LLM
        from outpace.targets.hf.load import hide_progress_bars

        hide_progress_bars(downloads=local or not console.is_terminal)
        engine = {"progress": report, **engine}
        return LLM(model, max_num_seqs=min(ROWS, max(1, texts)), **engine), params


@contextmanager
def working(
    console: Console, text: str, shown: bool = True
) -> Iterator[Callable[[str, float], None]]:
    """Shows a spinner while the block runs, on a terminal only.

    Yields a function that adds to the text what is being done, and how much of it is behind.
    """
    if not (shown and console.is_terminal):
        yield lambda step, done: None
        return
    with console.status(f"{text} ...") as status:
        yield lambda step, done: status.update(f"{text}: {step} ({done:.0%}) ...")
