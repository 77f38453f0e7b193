"""Packages that are installed only by whoever wants what needs them, and what only a clone has."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from outpace.errors import ConfigError

CLONE = Path(__file__).parents[3]
"""The folder of the repository, where outpace runs from a clone."""


def extra(package: str, what: str, install: str, called: str | None = None) -> Any:
    """Returns an optional package; ``ConfigError`` with the remedy where it is missing.

    what: needs it, as a user calls that. install: what pip is asked for. called: the package's name
    among its users, where it is imported by another.

    >>> extra("no_such_package", "a plot", "outpace[bench]")
    Traceback (most recent call last):
    outpace.errors.ConfigError: a plot needs no_such_package: pip install 'outpace[bench]'.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{what} needs {called or package}: pip install '{install}'.") from error


def lab_module(module: str, what: str) -> Any:
    """Returns a module of the repository's folder lab/; ``ConfigError`` with the remedy where
    outpace runs from an installed wheel, which does not have it.

    what: needs it, as a user calls that.
    """
    if not (CLONE / "lab" / "__init__.py").is_file():
        raise ConfigError(
            f"{what} is in the folder lab/ of the repository, which a wheel does not have: clone "
            "the repository, run 'pip install -e .' there, and give the command again."
        )
    if str(CLONE) not in sys.path:
        sys.path.insert(0, str(CLONE))
    return import_module(f"lab.{module}")
