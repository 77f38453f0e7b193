"""How the options of a drafter, or of a length policy, are made from what a user has written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from outpace.config import COMMON
from outpace.core.options import is_needed
from outpace.core.values import plain_entries
from outpace.errors import ConfigError, did_you_mean

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a drafter, or of a length policy, without options."""


def make_options(kind: type[Options], given: Mapping[str, Any], method: str) -> Options:
    """Returns the options of a drafter; ``ConfigError`` for a name that it does not have, and for
    one that it needs and was not given.

    Values are checked by the dataclass itself; numpy's numbers are taken like Python's.
    """
    options = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [one.name for one in options]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"unknown key {name!r} in speculative_config for method {method!r}"
                f"{did_you_mean(name, [*names, *COMMON])}."
            )
    for one in options:
        if is_needed(one) and given.get(one.name) is None:
            raise ConfigError(
                f"method {method!r} needs {one.name!r} in speculative_config. "
                f"{one.metadata['help']}"
            )
    return kind(**plain_entries(given))
