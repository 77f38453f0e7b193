"""``speculative_config``: which drafter, how much, and under which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.core.values import is_whole, shown
from outpace.errors import ConfigError, UnknownArgument, names_checked

DEFAULT_TOKENS: Literal["auto"] = "auto"
COMMON = ("method", "num_speculative_tokens", "verify")
"""The entries that all drafters know."""


@names_checked(UnknownArgument, "argument of SpeculativeConfig")
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate.

    method: a drafter's name: "none", "ngram", "draft_model" (default when ``model`` is given), ...
    num_speculative_tokens: tokens (nodes) to draft per round; "auto" chooses, from 0 up, by what
        rounds take and bring.
    verify: a rule's name, or ``{"name": ..., option: ...}`` for a rule with options; unset: the
        rule that suits the drafter.
    options: what only this drafter knows (``model``, ``prompt_lookup_max``, ...).
    """

    method: str = "none"
    num_speculative_tokens: int | Literal["auto"] = DEFAULT_TOKENS
    verify: str | Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if not isinstance(count, str) and is_whole(count) and count >= 0:
            object.__setattr__(self, "num_speculative_tokens", int(count))  # numpy's as well
        elif not (isinstance(count, str) and count == "auto"):
            raise ConfigError(
                f"num_speculative_tokens must be 'auto' or a whole number >= 0, not {shown(count)}."
            )
        if not isinstance(self.method, str):
            raise ConfigError(f"method must be a drafter's name, not {shown(self.method)}.")
        if not (self.verify is None or isinstance(self.verify, str) or _is_named(self.verify)):
            raise ConfigError(
                "verify must be a rule's name or {'name': ..., option: ...}, not "
                f"{shown(self.verify)}."
            )
        if not isinstance(self.options, Mapping) or not _has_text_keys(self.options):
            raise ConfigError(f"options must be a dict with names, not {shown(self.options)}.")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> SpeculativeConfig:
        """Returns the config with every drafter option under ``options``.

        >>> SpeculativeConfig.from_dict({"model": "small"}).method
        'draft_model'
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"speculative_config must be a dict, not {shown(config)}.")
        if not _has_text_keys(config):
            raise ConfigError(f"the keys of speculative_config must be names, not {shown(config)}.")
        common = {key: config[key] for key in COMMON if key in config}
        options = {key: value for key, value in config.items() if key not in COMMON}
        if "method" not in common:
            if "model" not in options:
                raise ConfigError(
                    "speculative_config names no method: add 'method', or 'model' for a draft "
                    "model."
                )
            common["method"] = "draft_model"
        return cls(**common, options=options)

    @property
    def rule_name(self) -> str | None:
        """The rule's name, if one was given."""
        if self.verify is None or isinstance(self.verify, str):
            return self.verify
        return str(self.verify["name"])

    @property
    def rule_options(self) -> dict[str, Any]:
        """The rule's own options."""
        if self.verify is None or isinstance(self.verify, str):
            return {}
        return {key: value for key, value in self.verify.items() if key != "name"}


def _is_named(rule: Any) -> bool:
    named = isinstance(rule, Mapping) and isinstance(rule.get("name"), str)
    return named and _has_text_keys(rule)


def _has_text_keys(entries: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in entries)
