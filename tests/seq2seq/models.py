"""Tiny random encoder-decoders in float64, one of each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import transformers

from targets.families import noised
from versions import skip_if_wrong

VOCABULARY = 64
CONTEXT = 64
LENGTH = 14

_BART: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": False,
}
_T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    # Distances share buckets from the fifth on, so that places matter far and near.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_WHISPER = {"max_source_positions": 20, "max_target_positions": CONTEXT, "num_mel_bins": 8}
_LED = {
    "max_encoder_position_embeddings": CONTEXT,
    "max_decoder_position_embeddings": CONTEXT,
    "attention_window": 4,
}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "t5": ("T5", _T5),
    "flan-t5": ("T5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5", _T5),
    "umt5": ("UMT5", _T5),
    "longt5": ("LongT5", {**_T5, "local_radius": 3}),
    "bart": ("Bart", _BART),
    "mbart": ("MBart", _BART),
    "plbart": ("PLBart", _BART),
    "mvp": ("Mvp", _BART),
    "pegasus": ("Pegasus", _BART),
    "marian": ("Marian", _BART),
    "blenderbot": ("Blenderbot", _BART),
    "blenderbot-small": ("BlenderbotSmall", _BART),
    "m2m100": ("M2M100", _BART),
    "led": ("LED", {**_BART, **_LED}),
    "bigbird-pegasus": ("BigBirdPegasus", {**_BART, "attention_type": "original_full"}),
    "whisper": ("Whisper", {**_BART, **_WHISPER}),
}
CLASSES = {"Marian": "MarianMTModel"}
SEEDS = {
    "t5": 4,
    "flan-t5": 3,
    "mt5": 5,
    "umt5": 6,
    "longt5": 4,
    "blenderbot": 2,
    "m2m100": 2,
    "led": 2,
}
"""Seeds of weights with which texts vary; 1 for the others."""
TEXTS = tuple(name for name in FAMILIES if name != "whisper")

PROMPTS: Sequence[Sequence[int]] = ([5, 6, 7, 8, 9], [3], [12, 13] * 6)
"""What encoders read: ragged."""


def build(name: str, **changes: Any) -> Any:
    """Returns a new model of the family with random weights, always the same ones."""
    kind, options = FAMILIES[name]
    skip_if_wrong(name)
    torch.manual_seed(SEEDS.get(name, 1))
    config = getattr(transformers, f"{kind}Config")(**{**options, **changes})
    made = CLASSES.get(kind, f"{kind}ForConditionalGeneration")
    model = getattr(transformers, made)(config).double().eval()
    with torch.no_grad():
        for called, weight in model.named_parameters():
            if weight.dim() > 1 and "t5" in name:
                weight.normal_(0, 2 if "relative" in called else 0.2)
            elif weight.dim() > 1:
                weight.mul_(6)
    return model


@cache
def target(name: str) -> Any:
    """Returns the family's model, shared by all tests: do not change it."""
    return build(name)


@cache
def drafter(name: str) -> Any:
    """Returns a noised copy of the family's shared model."""
    return noised(target(name), 0.1)


def features(rows: int = 3, seed: int = 5) -> torch.Tensor:
    """Returns what a tiny Whisper hears, ``[rows, M, F]``."""
    numbers = torch.Generator().manual_seed(seed)
    frames = 2 * _WHISPER["max_source_positions"]
    return torch.randn(rows, _WHISPER["num_mel_bins"], frames, generator=numbers).double()


def plain(model: Any, row: int, length: int = LENGTH, begin: Sequence[int] = ()) -> list[int]:
    """Returns what transformers' own greedy generate writes of a source alone, after the tokens
    that the decoder begins with."""
    start = model.generation_config.decoder_start_token_id
    asked = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None}
    asked["decoder_input_ids"] = torch.tensor([[start, *begin]])
    if model.main_input_name == "input_features":
        asked["input_features"] = features()[row : row + 1]
    else:
        asked["input_ids"] = torch.tensor([list(PROMPTS[row])])
    # Whisper's own generate prepares and cuts texts around this one.
    found: list[int] = transformers.GenerationMixin.generate(model, **asked)[0].tolist()
    return found[1 + len(begin) :]
