"""Imports of transformers when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def transformers() -> Any:
    """Returns transformers. Importing it takes seconds, which ``outpace --help`` shall not."""
    return import_module("transformers")


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers for a while: it would draw its own progress bars into ours."""
    logging = import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
