"""Packages that are installed only by whoever wants what needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from outpace.errors import ConfigError


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
