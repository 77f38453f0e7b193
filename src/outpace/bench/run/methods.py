"""Several ways to draft by their names: ``--methods ngram,suffix`` or ``--methods all``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.arguments import bundled_drafter
from outpace.draft.models.options import DraftModelOptions
from outpace.draft.registry import drafter_names, find_drafter
from outpace.errors import ConfigError

ALL = "all"
"""Stands for every drafter that can be built from what is given."""

PLAIN = "none"
"""The name of plain decoding, which always takes part."""


@dataclass(frozen=True)
class NamedMethods:
    """One ``speculative_config`` for each method, and why others were left out."""

    configs: tuple[Mapping[str, Any], ...]
    left_out: Mapping[str, str]
    all_required: bool = True
    """Whether each was asked for by its name, so that none may be left out."""


def named_methods(
    names: Sequence[str], shared: Mapping[str, Any], bundled: Path | None = None
) -> NamedMethods:
    """Returns the configurations of the methods with these names.

    shared: what every configuration says besides its method; 'model', a draft model, goes to those
    that run one. bundled: where the bundled models are, for the bundled target, which brings heads
    for some methods. Of "all", methods that need more than that are left out, with the reason.
    Raises ``ConfigError`` for an unknown method, and for a method by name that needs more.

    >>> named_methods(["ngram"], {"model": "a/draft/model"}).configs
    ({'method': 'ngram'},)
    """
    if list(names) != [ALL]:
        found = tuple(_config(name, shared, bundled) for name in names)
        for config in found:
            _try(config)
        return NamedMethods(found, {})
    configs, left_out = [], {}
    for name in drafter_names():
        if name == PLAIN:
            continue
        config = _config(name, shared, bundled)
        try:
            _try(config)
        except ConfigError as error:
            left_out[name] = str(error).rstrip(".")
        else:
            configs.append(config)
    return NamedMethods(tuple(configs), left_out, all_required=False)


def _config(name: str, shared: Mapping[str, Any], bundled: Path | None) -> dict[str, Any]:
    """What is shared, without the draft model where the method runs none, but with the head that
    comes with the bundled target."""
    runs_one = issubclass(find_drafter(name).Options, DraftModelOptions)
    kept = {key: value for key, value in shared.items() if key != "model" or runs_one}
    head = None if bundled is None else bundled_drafter(name, bundled)
    brought = {} if head is None else {"model": str(head)}
    return {"method": name, **brought, **kept}


def _try(config: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where the method's own options lack something."""
    given = {key: config[key] for key in ("model",) if key in config}
    find_drafter(config["method"]).configure(given)
