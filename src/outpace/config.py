"""``speculative_config``: which drafter, how much, and under which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.core.trees.tree_shape import LARGEST
from outpace.core.values import is_whole, shown
from outpace.errors import ConfigError, UnknownArgument, names_checked

DEFAULT_TOKENS: Literal["auto"] = "auto"
COMMON = ("method", "num_speculative_tokens", "length", "verify")
"""The entries that all drafters know."""
OF_TRANSFORMERS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
"""What transformers calls the same things in assisted generation: these names are taken, too."""


@names_checked(UnknownArgument, "argument of SpeculativeConfig")
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate.

    Most callers write a dict, from which `from_dict` makes one: there the drafter's options stand
    with the others, and "draft_model" is the method where ``model`` comes with the draft's
    length, a rule or ``online``.

    method: a drafter's name: "auto" (the default: look-ups, and the draft model where ``model`` is
        given, as far as they pay), "draft_model", "none" (plain decoding), "ngram", ...
    num_speculative_tokens: tokens (nodes) to draft per round, at most 256; "auto" chooses, from 0
        up, by what rounds take and bring.
    length: a length policy's name, or ``{"name": ..., option: ...}``: how much is drafted by
        another rule than "auto"; num_speculative_tokens is then the first length, or the most.
    verify: a rule's name, or ``{"name": ..., option: ...}`` for a rule with options; unset: the
        rule that suits the drafter.
    options: what only this drafter knows (``model``, ``prompt_lookup_max``, ...).
    """

    method: str = "auto"
    num_speculative_tokens: int | Literal["auto"] = DEFAULT_TOKENS
    length: str | Mapping[str, Any] | None = None
    verify: str | Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if not isinstance(count, str) and is_whole(count) and 0 <= count <= LARGEST:
            object.__setattr__(self, "num_speculative_tokens", int(count))  # numpy's as well
        elif not (isinstance(count, str) and count == "auto"):
            raise ConfigError(
                f"num_speculative_tokens must be 'auto' or a whole number from 0 to {LARGEST}, not "
                f"{shown(count)}."
            )
        if not isinstance(self.method, str):
            raise ConfigError(f"method must be a drafter's name, not {shown(self.method)}.")
        for key, what in (("verify", "a rule"), ("length", "a length policy")):
            value = getattr(self, key)
            if not (value is None or isinstance(value, str) or _is_named(value)):
                raise ConfigError(
                    f"{key} must be {what}'s name or {{'name': ..., option: ...}}, not "
                    f"{shown(value)}."
                )
        if not isinstance(self.options, Mapping) or not _has_text_keys(self.options):
            raise ConfigError(f"options must be a dict with names, not {shown(self.options)}.")

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], its_method: str = "draft_model"
    ) -> SpeculativeConfig:
        """Returns the config with every drafter option under ``options``.

        its_method: that of what ``model`` names, where it comes with how it is to draft.

        >>> SpeculativeConfig.from_dict({"model": "small"}).method
        'auto'
        >>> SpeculativeConfig.from_dict({"model": "small", "num_speculative_tokens": 4}).method
        'draft_model'
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"speculative_config must be a dict, not {shown(config)}.")
        for key in config:
            if not isinstance(key, str):
                raise ConfigError(
                    f"the keys of speculative_config must be names, not {shown(key)}."
                )
        config = _translated(config)
        common = {key: config[key] for key in COMMON if key in config}
        options = {key: value for key, value in config.items() if key not in COMMON}
        if "method" not in common and "model" in options and not _is_open(config):
            common["method"] = its_method
        return cls(**common, options=options)

    @classmethod
    def of_child(cls, config: Mapping[str, Any]) -> SpeculativeConfig:
        """Returns the config of a drafter that another one asks: its ``model`` is a draft model
        unless the method says otherwise."""
        if isinstance(config, Mapping) and "model" in config:
            config = {"method": "draft_model", **config}
        return cls.from_dict(config)

    @property
    def rule_name(self) -> str | None:
        """The rule's name, if one was given."""
        return _name_of(self.verify)

    @property
    def rule_options(self) -> dict[str, Any]:
        """The rule's own options."""
        return _options_of(self.verify)

    @property
    def length_name(self) -> str | None:
        """The length policy's name, if one was given."""
        return _name_of(self.length)

    @property
    def length_options(self) -> dict[str, Any]:
        """The length policy's own options."""
        return _options_of(self.length)


def _is_open(config: Mapping[str, Any]) -> bool:
    """Whether nothing is said of how a draft model is to draft: how much, under which rule, and
    whether it learns from what it drafts."""
    count = config.get("num_speculative_tokens", DEFAULT_TOKENS)
    said = any(config.get(key) is not None for key in ("length", "verify", "online"))
    return count == DEFAULT_TOKENS and not said


def _name_of(entry: str | Mapping[str, Any] | None) -> str | None:
    return entry if entry is None or isinstance(entry, str) else str(entry["name"])


def _options_of(entry: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if entry is None or isinstance(entry, str):
        return {}
    return {key: value for key, value in entry.items() if key != "name"}


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with transformers' names for lengths replaced by ours."""
    found = {key: value for key, value in config.items() if key not in OF_TRANSFORMERS}
    count, schedule, threshold = (config.get(key) for key in OF_TRANSFORMERS)
    if threshold is not None and schedule not in (None, "constant"):
        raise ConfigError(f"{OF_TRANSFORMERS[1]} and {OF_TRANSFORMERS[2]}: give one of the two.")
    by_threshold = {"name": "confidence", "threshold": threshold}
    for theirs, given, ours, value in (
        (OF_TRANSFORMERS[0], count, "num_speculative_tokens", count),
        (OF_TRANSFORMERS[2], threshold, "length", by_threshold),
        (OF_TRANSFORMERS[1], schedule, "length", schedule if threshold is None else by_threshold),
    ):
        if given is None:
            continue
        if ours in config:
            raise ConfigError(f"{theirs} and {ours} are the same thing: give one of the two.")
        found[ours] = value
    return found


def _is_named(rule: Any) -> bool:
    named = isinstance(rule, Mapping) and isinstance(rule.get("name"), str)
    return named and _has_text_keys(rule)


def _has_text_keys(entries: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in entries)
