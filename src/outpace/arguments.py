"""The arguments of ``LLM``: checked before anything is loaded, and read into plain Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.config import SpeculativeConfig
from outpace.core.beam_params import BeamSearchParams
from outpace.core.params import SamplingParams
from outpace.core.values import flag, shown, whole
from outpace.errors import ConfigError, ParamsError
from outpace.heads.checkpoint import kind_in
from outpace.targets.hf.loading.loaded import Loaded, check_tokenizer

Params = SamplingParams | Mapping[str, Any]
"""Sampling options as a call may give them."""

OWN_CONFIG = ("auto", "none")
"""Values of ``generation_config``."""

SET_ASIDE = (
    "correct the file generation_config.json, or set it aside with LLM(..., "
    "generation_config='none')."
)


MOST_ROWS = 1 << 16
"""The most texts that may be decoded at once: more than any machine has room for, and few enough
that a slip of the hand does no harm."""


def rows(name: str, value: Any) -> int:
    """Returns a number of rows that a batch may have."""
    return whole(name, value, least=1, most=MOST_ROWS, error=ConfigError)


def tokens(name: str, value: Any) -> int:
    """Returns a number of tokens: a whole number of at least 1."""
    return whole(name, value, least=1, error=ConfigError)


def tokens_or_none(name: str, value: Any) -> int | None:
    """Returns a number of tokens, or None where none was given."""
    return None if value is None else tokens(name, value)


def check_held(held: int | None, context: int) -> None:
    """Raises ``ConfigError`` for a ``max_batch_total_tokens`` that cannot hold one longest text."""
    if held is not None and held < context:
        raise ConfigError(
            f"max_batch_total_tokens={held} is less than one text may have ({context} tokens): "
            "raise it, or give a smaller max_model_len."
        )


def folder(name: str, value: Any) -> Path:
    """Returns the path of a folder that is written to; ``ConfigError`` for what is no path."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{name} must be the path of a folder, not {shown(value)}.")
    return Path(path)


def check_flags(**flags: Any) -> None:
    """Raises ``ConfigError`` for a flag that is neither True nor False, such as "no"."""
    for name, value in flags.items():
        flag(name, value, error=ConfigError)


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ``ConfigError`` for a value that is none of the known words."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{name} must be {' or '.join(map(repr, words))}, not {shown(value)}.")


def check_kinds(
    model: Any, tokenizer: Any, dtype: Any, device: Any, quantization: Any, progress: Any
) -> None:
    """Raises ``ConfigError`` for an argument that is no model, tokenizer, dtype, ... at all."""
    none = type(None)
    kinds = (str, os.PathLike, nn.Module, Loaded, none)
    _check_kind("model", model, kinds, "a path, a hub name or a loaded model")
    check_tokenizer(tokenizer)
    _check_kind("dtype", dtype, (str, torch.dtype), "a name such as 'float32' or a torch.dtype")
    _check_kind("device", device, (str, torch.device), "a name such as 'cpu' or a torch.device")
    _check_kind("quantization", quantization, (str, none), "the name of a kind, or None for none")
    if not (progress is None or callable(progress)):
        raise ConfigError(
            f"progress must be a function of a step and its share, not {shown(progress)}."
        )


def _check_kind(name: str, value: Any, kinds: tuple[type, ...], what: str) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {what}, not {shown(value)}.")


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where the model's generation_config sets an option to nonsense.

    Without this, requests that do not set the option would be refused for a value of which their
    caller knows nothing.
    """
    try:
        SamplingParams().resolve(defaults)
    except ParamsError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"the model's generation_config cannot be used ({reason}): {SET_ASIDE}"
        ) from error


def paired(sampling_params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """Returns the params of each of ``count`` prompts: given once for all, or one for each.

    Each may be ``SamplingParams`` or a dict of its options. Raises ``ParamsError``.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, (SamplingParams, Mapping)):
        return [_params(sampling_params)] * count
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, (str, bytes)):
        raise ParamsError(
            f"sampling_params must be SamplingParams, a dict, or a list of them, not "
            f"{shown(sampling_params)}."
        )
    if len(sampling_params) != count:
        raise ParamsError(
            f"{count} prompts came with {len(sampling_params)} sampling_params: give one or "
            f"{count}."
        )
    return [_params(params) for params in sampling_params]


def _params(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    return SamplingParams.from_dict(given)


def beams(params: BeamSearchParams | Mapping[str, Any] | None) -> BeamSearchParams:
    """Returns the options of a beam search, given as such, as a dict, or not at all."""
    if params is None:
        return BeamSearchParams()
    if isinstance(params, BeamSearchParams):
        return params
    if not isinstance(params, Mapping):
        raise ParamsError(
            f"params of a beam search must be BeamSearchParams or a dict, not {shown(params)}."
        )
    return BeamSearchParams.from_dict(params)


def speculation(
    config: Mapping[str, Any] | SpeculativeConfig | None, bundled: Path | None
) -> SpeculativeConfig:
    """Returns how to speculate; with nothing named, by "auto" without a draft model, or with the
    bundled one by "draft_model": passes of the bundled target are so short that choosing among
    drafters takes a noticeable part of them. A trained head drafts by the method that it is of.
    bundled: where the bundled models are, for the bundled target; else None."""
    if isinstance(config, SpeculativeConfig):
        return config
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        return SpeculativeConfig.from_dict(config)
    head = kind_in(config.get("model"))
    its_method = head or "draft_model"
    if bundled is not None:
        method = config.get("method", its_method)
        drafter = bundled_drafter(method, bundled)
        if drafter is not None:
            config = {"method": method, "model": drafter, **config}
        elif head is not None:
            config = {"method": method, **config}
    return SpeculativeConfig.from_dict(config, its_method)


def bundled_drafter(method: Any, bundled: Path) -> Path | None:
    """Returns what comes with the bundled target for a method, if anything does."""
    if method in ("draft_model", "draft_tree"):
        return bundled / "drafter"
    head = bundled / "heads" / str(method)
    return head if (head / "config.json").is_file() else None


def context(wanted: int | None, longest: int) -> int:
    """Returns the longest prompt and text together; unset: what the model has positions for.
    longest: those."""
    if wanted is None:
        return longest
    if not 1 < wanted <= longest:
        raise ConfigError(f"max_model_len must be in [2, {longest}] for this model, not {wanted}.")
    return wanted


def check_ids(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    """Raises ``ParamsError`` for a token id that the model cannot generate."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ParamsError(
                f"{name} holds {shown(token)}: token ids are whole numbers in [0, {vocabulary})."
            ).about(name)
