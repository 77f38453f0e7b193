"""Imports of large and of optional packages when they are first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from outpace.errors import ConfigError


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


def extra(package: str, what: str, install: str) -> Any:
    """Returns an optional package; ``ConfigError`` with the remedy where it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{what} needs {package}: pip install '{install}'.") from error
