"""The families that transformers lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from transformers.models.auto import modeling_auto as auto

from outpace.errors import ConfigError, did_you_mean

Kind = Literal["causal", "speech", "seq2seq", "image-text"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Family(NamedTuple):
    """A family of models, as transformers lists it."""

    family: str
    """The ``model_type`` of its configuration."""
    model: str
    """The name of its class."""
    kind: Kind = "causal"


def listed(only: Iterable[str] | None = None, kinds: Iterable[str] | None = None) -> list[Family]:
    """Returns the families of the installed transformers, by kind and then by name. One whose class
    is listed for speech is not tried as a reader of texts once more.

    only: these types, which may be of several kinds. kinds: unset: all. Raises ``ConfigError`` for
    a type that transformers does not list among these kinds, and for a kind that nobody knows.
    """
    chosen = set(KINDS if kinds is None else kinds)
    for kind in chosen - {*KINDS}:
        raise ConfigError(f"there are no models of kind {kind!r}: give one of {', '.join(KINDS)}.")
    found = [family for kind in KINDS if kind in chosen for family in _of(kind)]
    if chosen >= {"speech", "seq2seq"}:
        heard = {family[:2] for family in found if family.kind == "speech"}
        found = [one for one in found if one.kind != "seq2seq" or one[:2] not in heard]
    if only is None:
        return found
    asked, names = {*only}, {family.family for family in found}
    for name in sorted(asked - names):
        raise ConfigError(
            f"transformers lists no model of type {name!r} ({', '.join(sorted(chosen))})"
            f"{did_you_mean(name, names)}."
        )
    return [family for family in found if family.family in asked]


def _of(kind: Kind) -> list[Family]:
    mapping: Mapping[Kind, Mapping[str, str | tuple[str, ...]]] = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    # Where several classes are listed, from_pretrained picks the first.
    return [
        Family(family, names if isinstance(names, str) else names[0], kind)
        for family, names in sorted(mapping[kind].items())
    ]
