"""Checks whether a model can be decoded speculatively, by its class and configuration: others are
refused when they are loaded.

What no configuration says (a model that ignores its mask or its positions, without an error) is
tried out by `probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from outpace.core.values import is_integer, shown
from outpace.errors import UnsupportedModel
from outpace.targets.hf import device_map, kinds
from outpace.targets.hf.attention import BOOLEAN, INDEXED_LAYERS
from outpace.targets.hf.kinds import is_encoder_decoder, reads_sources
from outpace.targets.hf.plain import is_causal_by_default
from outpace.targets.hf.position_patches import PositionPatches
from outpace.targets.hf.recurrent.families import NO_KV_LAYER_TYPES, STATES, has_recurrent_states
from outpace.targets.hf.runner import PREFILL_CHUNK
from outpace.targets.hf.seq2seq.inputs import FEATURES, audio_feature_shape

MASKED = INDEXED_LAYERS | {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers whose masks are known."""
MASKABLE = BOOLEAN | {"eager"}

MAX_LAYERS = 2_000
"""Many times those of the largest models. transformers makes all layers before it looks for their
weights, so that a damaged number would keep it busy until memory ends."""

_ASSISTS = "it drafts for a Gemma 4, whose keys and values it reads, and writes nothing by itself"
NO_TEXT = {
    "gemma4_assistant": _ASSISTS,
    "gemma4_unified_assistant": _ASSISTS,
    "vibevoice": "it writes speech, of which it reads each piece back as an embedding, and no text",
}
"""Types of models that are no targets, and why."""

NO_DRAFTS = {
    "switch_transformers": "its experts drop tokens when many of a pass choose the same one",
    "nllb-moe": "its experts drop tokens when many of a pass choose the same one",
    "prophetnet": "its decoder predicts several tokens at once, with a state for each",
    "xlm-prophetnet": "its decoder predicts several tokens at once, with a state for each",
    "dia": "it writes nine channels of audio codes at once, and outpace writes one text",
    "fsmt": "its decoder takes a mask or a cache, and drafts need both",
    "t5gemma2": "its decoder sees source and text in one attention, where outpace keeps them apart",
    "udop": "its encoder reads where words stand on a page, too, and outpace gives it words only",
    "rag": "it looks documents up while it writes",
    "encoder-decoder": "it is made of two models that count positions each in its own way",
    "speech-encoder-decoder": "it is made of two models that count positions each in its own way",
    "vision-encoder-decoder": "it is made of two models that count positions each in its own way",
}
"""Types of encoder-decoders that cannot work, and why."""


def check_type(model_type: str) -> None:
    """Raises ``UnsupportedModel`` where the type of a model alone tells that it writes no text, or
    that its code is wrong in the installed transformers."""
    if model_type in NO_TEXT:
        raise UnsupportedModel(
            f"a model of type {model_type!r} cannot be decoded speculatively, because "
            f"{NO_TEXT[model_type]}: use another model."
        )
    needed = kinds.too_old_for(model_type)
    if needed is not None:
        raise UnsupportedModel(
            f"a model of type {model_type!r} cannot be decoded speculatively with transformers "
            f"{kinds.INSTALLED}, whose code for it reads drafted tokens wrong: install "
            f"transformers {needed} or later."
        )


def check_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration alone tells that it cannot work."""
    check_type(config.model_type)
    text: Any = config.get_text_config()
    name = f"a model of type {config.model_type!r}"
    classes = getattr(config, "architectures", None)
    if not (classes is None or _are_names(classes)):
        raise UnsupportedModel(
            f"{name} has {shown(classes)} for the names of its classes in its config.json "
            "(architectures): download or save the model again."
        )
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and not (is_integer(layers) and 0 < layers <= MAX_LAYERS):
        raise UnsupportedModel(
            f"{name} has {shown(layers)} layers by its config.json (num_hidden_layers): download "
            "or save the model again."
        )
    layer_types = set(getattr(text, "layer_types", None) or ())
    if reads_sources(config):
        _check_encoder_decoder_config(config)
    _check_states(config)
    unknown = layer_types - MASKED - NO_KV_LAYER_TYPES - STATES
    if unknown:
        raise UnsupportedModel(
            f"{name} has layers of type {sorted(unknown)}, for which no mask of "
            "drafted tokens is known: use a model with full or sliding attention."
        )
    if _asks_for_alibi(text):
        raise UnsupportedModel(
            f"{name} has ALiBi biases, which are the same for all rows and cannot follow the "
            "branches of a draft: use a model with rotary or learned positions."
        )


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _check_states(config: Any) -> None:
    """Raises ``UnsupportedModel`` for an xLSTM that would take a pass to pieces, of which only the
    last one's states came back."""
    most = getattr(config, "max_inference_chunksize", None)
    if most is not None and most < PREFILL_CHUNK:
        raise UnsupportedModel(
            f"a model of type {config.model_type!r} reads at most {most} tokens at once by its "
            f"config.json (max_inference_chunksize), and passes of up to {PREFILL_CHUNK} must stay "
            f"whole for states to be taken back: set it to {PREFILL_CHUNK} or more."
        )


def _asks_for_alibi(text: Any) -> bool:
    # MPT's option is inside the options of its attention. Bloom and Falcon have position patches.
    return bool(getattr(getattr(text, "attn_config", None), "alibi", False))


def check(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where configuration or class tell that the model cannot work."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModel(
            f"{type(model).__name__} is no model of transformers: it has no configuration. Give a "
            "model that AutoModelForCausalLM has loaded, taken out of what wraps it, or its path."
        )
    check_config(config)
    name = type(model).__name__
    if device_map.is_multi_device(model):
        device_map.check(model, _why_on_one_device(model))
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise UnsupportedModel(
            f"{name} has no vocabulary by its configuration, and so writes no text: use another "
            "model."
        )
    _check_writes(model)
    if is_encoder_decoder(model):
        _check_encoder(model)
    attention = config.get_text_config()._attn_implementation
    if attention not in MASKABLE:
        raise UnsupportedModel(
            f"{name} runs {attention!r} attention, which takes no mask of drafted tokens: load it "
            "with attn_implementation='sdpa'."
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and not is_causal_by_default(model):
        raise UnsupportedModel(
            f"{name} reads prompts both ways and has sliding windows, but takes no mask for each "
            "type of layer: use another model, such as PaliGemma 1."
        )


def _why_on_one_device(model: nn.Module) -> str | None:
    """Why a model cannot lie on several devices, None if it can."""
    loaded: Any = model
    if is_encoder_decoder(model):
        return "is an encoder-decoder"
    if has_recurrent_states(loaded.config):
        return "keeps recurrent states"
    if PositionPatches(model).needed:
        return "counts positions by slots of the cache"
    return None


def _check_writes(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` for a model without a head that writes, or without weights."""
    loaded: Any = model
    name = type(model).__name__
    if not loaded.can_generate():
        raise UnsupportedModel(
            f"{name} has no head that writes texts, by its class: give the model's path, or load "
            "it with a class that has one, such as AutoModelForCausalLM."
        )
    if loaded.device.type == "meta":
        raise UnsupportedModel(
            f"the weights of this {name} are not in memory, but on the device 'meta': load the "
            "model with its weights."
        )


# -- encoder-decoders ------------------------------------------------------------------------------


def _check_encoder_decoder_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration of an encoder-decoder alone tells that it
    cannot work."""
    name = f"a model of type {config.model_type!r}"
    reason = NO_DRAFTS.get(config.model_type)
    if reason is not None:
        raise UnsupportedModel(
            f"{name} cannot be decoded speculatively, because {reason}: use another model."
        )
    own = getattr(config, "decoder_vocab_size", None)
    if own is not None and own != config.vocab_size:
        raise UnsupportedModel(
            f"{name} has {own} tokens in its decoder and {config.vocab_size} in its encoder: use a "
            "model in which they share one vocabulary."
        )
    types: Sequence[str] = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if "sliding_attention" in types:
        raise UnsupportedModel(
            f"{name} cannot be decoded speculatively, because its decoder has sliding windows, and "
            "outpace knows no masks for windows together with a source: use another model."
        )


def _check_encoder(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where the encoder reads what outpace cannot give it."""
    loaded: Any = model
    reads: str = loaded.main_input_name
    if reads == "input_ids" or (
        reads == FEATURES and audio_feature_shape(loaded.config) is not None
    ):
        return
    raise UnsupportedModel(
        f"the encoder of {type(model).__name__} reads {reads!r} in a form of its own, and outpace "
        "gives encoders token ids or audio as Whisper hears it: use another model."
    )
