"""``speculative_config``: which drafter, how much, and under which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from outpace.core.options import Reader, Reads, read_options
from outpace.core.trees.tree_shape import MAX_TREE_NODES
from outpace.core.values import shown
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


def _method(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a drafter's name, not {shown(value)}.")
    return value


def _named(what: str) -> Reader:
    """Reads what has a name and may have options."""

    def read(name: str, value: Any) -> Any:
        entries = isinstance(value, Mapping) and isinstance(value.get("name"), str)
        if not (isinstance(value, str) or (entries and _has_text_keys(value))):
            raise ConfigError(
                f"{name} must be {what}'s name or {{'name': ..., option: ...}}, not {shown(value)}."
            )
        return value

    return read


def _options(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping) or not _has_text_keys(value):
        raise ConfigError(f"{name} must be a dict with names, not {shown(value)}.")
    return value


@names_checked(UnknownArgument, "argument of SpeculativeConfig")
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate.

    Most callers write a dict, from which `from_dict` makes one: there the drafter's options stand
    with the others, and "draft_model" is the method where ``model`` comes with the draft's
    length, a rule or ``online``.
    """

    method: Annotated[str, Reads(_method)] = "auto"
    """A drafter's name: "auto" (look-ups, and what ``model`` names or else the target's own
    multi-token-prediction modules, as far as they pay), "draft_model", "none" (plain decoding),
    "ngram", ... Unset for the bundled target: its draft model, or the head that ``model`` names,
    alone."""
    num_speculative_tokens: Annotated[Literal["auto"] | int, Ge(0), Le(MAX_TREE_NODES)] = (
        DEFAULT_TOKENS
    )
    """Tokens (nodes) to draft per round; "auto" chooses, from 0 up, by what rounds take and
    bring."""
    length: Annotated[str | Mapping[str, Any] | None, Reads(_named("a length policy"))] = None
    """A length policy's name, or ``{"name": ..., option: ...}``: how much is drafted by another
    rule than "auto"; num_speculative_tokens is then the first length, or the most."""
    verify: Annotated[str | Mapping[str, Any] | None, Reads(_named("a rule"))] = None
    """A rule's name, or ``{"name": ..., option: ...}`` for a rule with options, such as
    ``{"name": "ears", "tolerance": 0.1}``. Unset: the rule that suits the drafter."""
    options: Annotated[Mapping[str, Any], Reads(_options)] = field(default_factory=dict)
    """What only this drafter knows (``model``, ``prompt_lookup_max``, ...)."""

    def __post_init__(self) -> None:
        read_options(self, ConfigError)

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


def _has_text_keys(entries: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in entries)
