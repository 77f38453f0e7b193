"""Arguments of a call of transformers' ``generate``: checked, and its prompts without padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from outpace.errors import ConfigError, PromptError
from outpace.targets.hf.cache import CACHE_ARGUMENTS
from outpace.targets.hf.kinds import placeholders

PLAIN = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}
"""Ways to generate that outpace speeds up."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""Options that ask for more than tokens."""
EXACT_CACHES = {None, "dynamic", "static", "hybrid", "sliding_window"}
"""Values of ``cache_implementation`` with which the text is the same as with slots."""
TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Arguments that are all 0 where no token stands for an image."""
CACHES = {*CACHE_ARGUMENTS, "cache_params"}
"""What models call their cache. ``generate`` makes an empty one where the caller gives none."""
UNDERSTOOD = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES}
"""Arguments of the model that are read here or make no difference; all others are refused."""


def arguments_of_generate() -> Mapping[str, Any]:
    """Returns the arguments of the ``generate`` call that the caller is part of, or nothing.

    transformers 5.23 hands a ``custom_generate`` function neither the streamer, to which it has
    shown the prompt by then, nor the assistant model. ``_extract_generation_mode_kwargs`` drops
    both, and passes on only arguments that ``generate`` itself does not have. So they stand nowhere
    but in the variables of ``generate``, and they are read there: without them a streamer would be
    left waiting in silence. A test fails once transformers hands over the streamer.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def check_config(config: GenerationConfig) -> None:
    """Raises ``ConfigError`` unless greedy search or sampling is asked for, and only its tokens."""
    mode = config.get_generation_mode()
    if mode not in PLAIN:
        raise ConfigError(
            f"generate was asked for {mode.value}, and outpace.hf.speculative does greedy search "
            "and sampling: unset what asks for it (num_beams, penalty_alpha, dola_layers, "
            "prompt_lookup_num_tokens, ...) or drop custom_generate."
        )
    if config.return_dict_in_generate:
        for name in OUTPUTS:
            if getattr(config, name, None):
                raise ConfigError(
                    f"outpace.hf.speculative does not return what {name} asks for: unset it, or "
                    "drop custom_generate."
                )
    if config.cache_implementation not in EXACT_CACHES:
        raise ConfigError(
            f"outpace.hf.speculative has a cache of its own: unset cache_implementation="
            f"{config.cache_implementation!r}."
        )


def media_of(model: nn.Module, input_ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes what belongs to images out of the arguments that ``generate`` would hand to the model,
    and returns it; nothing for a model that reads text only.

    Raises ``ConfigError`` for images of several rows: nothing says which belong to which.
    """
    if not placeholders(model.config):
        return {}
    names = [name for name in model_kwargs if name not in UNDERSTOOD]
    media = {name: model_kwargs.pop(name) for name in names}
    media = {name: value for name, value in media.items() if not (value is None or value == {})}
    positions: Any = model_kwargs.get("position_ids")
    on_axes = positions is not None and positions.dim() == 3
    if on_axes:
        del model_kwargs["position_ids"]
    if all(name in TYPES and not value.any() for name, value in media.items()):
        return {}  # the tokens of a text without images
    mask = model_kwargs.get("attention_mask")
    if len(input_ids) > 1 or not (mask is None or bool(mask.all())):
        raise ConfigError(
            "outpace.hf.speculative reads the images of one prompt at a time, without padding: "
            "call generate for each prompt, or use outpace.LLM, which takes many."
        )
    if on_axes:
        # The model's own, made by images that generate has turned into features since. The first of
        # four counts tokens; the others are time, height and width.
        media["position_ids"] = positions[-3:]
    return media


def pixels_of(
    model: nn.Module, media: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns what a processor made of the images of a ``generate`` call; None where ``media``,
    what the model is called with, is just that: for some models generate makes features of it.

    asked: the call's own arguments.
    """
    if "mm_encoder_outputs" not in media:
        return None
    own = asked.get("kwargs") or {}
    known: Any = model.forward
    names = inspect.signature(known).parameters.keys() - UNDERSTOOD - {"input_ids"}
    return {name: own[name] for name in own.keys() & names if own[name] is not None}


def unpadded(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Returns each row's token ids without the padding on either side.

    input_ids: ``[B, T]``. model_kwargs: what else ``generate`` would hand to the model. Raises
    ``ConfigError`` for an argument that outpace would drop, ``PromptError`` for an empty row.
    """
    for name, value in model_kwargs.items():
        if name not in UNDERSTOOD and value is not None:
            raise ConfigError(
                f"outpace.hf.speculative cannot pass {name!r} on to the model: drop it, or drop "
                "custom_generate."
            )
    for name in CACHES & model_kwargs.keys():
        if _holds_text(model_kwargs[name]):
            raise ConfigError(f"outpace.hf.speculative cannot go on from {name}: drop them.")
    mask = model_kwargs.get("attention_mask")
    keep = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    _check_positions(keep.bool(), model_kwargs.get("position_ids"))
    prompts: list[list[int]] = [
        row[kept].tolist() for row, kept in zip(input_ids, keep.bool(), strict=True)
    ]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise PromptError(
                f"row {row} of the prompts is empty or all padding: give it at least one token."
            )
    return prompts


def _holds_text(cache: Any) -> bool:
    """Returns whether a model has read tokens into a cache of transformers."""
    if cache is None:
        return False
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # a cache of nothing but states has no length
        return bool(cache.has_previous_state())


def _check_positions(keep: Tensor, positions: Tensor | None) -> None:
    if positions is None:
        return
    counted = keep.long().cumsum(-1) - 1
    given = positions.to(keep.device).expand_as(counted)
    if not torch.equal(given[keep], counted[keep]):
        raise ConfigError(
            "outpace.hf.speculative counts positions from each row's first token: drop "
            "position_ids."
        )
