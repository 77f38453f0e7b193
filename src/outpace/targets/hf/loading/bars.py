"""The loading bars of transformers and of its hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.utils import logging as transformers_logging


def hide_progress_bars(*, downloads: bool) -> None:
    """Silences transformers' loading bars, for programs that show their own progress.

    downloads: those of the hub too. Changes the whole process.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # hides both kinds
    if not downloads:
        enable_progress_bars()


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """Hides transformers' loading bars for a while, and leaves those of downloads as they are."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    hub = not are_progress_bars_disabled()
    hide_progress_bars(downloads=not hub)
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if not hub:
            disable_progress_bars()
