"""The families that transformers lists."""

from __future__ import annotations

from collections.abc import Iterable

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outpace.errors import ConfigError, did_you_mean


def listed(only: Iterable[str] | None = None) -> dict[str, str]:
    """Returns the causal language models of the installed transformers: by the ``model_type`` of
    their configuration the name of their class.

    only: these types. Raises ``ConfigError`` for one that transformers does not list.
    """
    # Where several classes are listed, from_pretrained picks the first.
    found = {
        family: names if isinstance(names, str) else names[0]
        for family, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    }
    if only is None:
        return found
    for name in only:
        if name not in found:
            raise ConfigError(
                f"transformers lists no causal language model of type {name!r}"
                f"{did_you_mean(name, found)}."
            )
    return {name: found[name] for name in only}
