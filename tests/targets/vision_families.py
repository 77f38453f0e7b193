"""Tiny random vision-language models in float64, and inputs as their processors make them.

A prompt is a list of token ids, in which `IMAGE` stands for one image; `with_image` puts as many
placeholders there as the family's vision tower makes features, and adds pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from .families import BASE, BOTH, WINDOW

VOCABULARY = 64
PLACEHOLDER = 60
START, END = 61, 62
IMAGE = -1
"""Stands for an image in the prompts below."""
CONTEXT = 256

TOWER: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
}


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def _square(images: int) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(images, 3, 16, 16)}


def _listed(images: int) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(1, images, 3, 16, 16)}


def _sized(images: int) -> dict[str, Tensor]:
    return {**_square(images), "image_sizes": torch.tensor([[16, 16]] * images)}


def _tiled(images: int) -> dict[str, Tensor]:
    """One tile for the whole image, and two for its halves."""
    pixels = _pixels(images, 3, 3, 16, 16)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 32]] * images)}


def _gridded(images: int) -> dict[str, Tensor]:
    """Patches ``[n, 3 * 2 * 4 * 4]`` of images that are 4 patches high and 6 wide."""
    return {
        "pixel_values": _pixels(images * 24, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 6]] * images),
    }


def _placed(images: int) -> dict[str, Tensor]:
    """Patches ``[images, 16, 3 * 4 * 4]`` with their places."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
    return {
        "pixel_values": _pixels(images, 16, 3 * 4 * 4).sigmoid(),
        "image_position_ids": places.repeat(images, 1, 1),
    }


@dataclass(frozen=True)
class VisionFamily:
    """A model, how many placeholders an image has, and what its processor makes of images."""

    config: str
    text: str
    vision: Mapping[str, Any]
    features: int
    made: Callable[[int], dict[str, Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)
    text_options: Mapping[str, Any] = field(default_factory=dict)
    types: str | None = None
    """The argument that marks placeholders, if there is one."""
    scale: float = 6.0
    attention: str | None = None
    prefix: bool = False
    """Whether a prompt with an image attends both ways, all of it."""


CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
GEMMA = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": BOTH}

FAMILIES: Mapping[str, VisionFamily] = {
    "llava": VisionFamily("LlavaConfig", "llama", CLIP, 16, _square, {"image_seq_length": 16}),
    "llava_next": VisionFamily(
        "LlavaNextConfig",
        "mistral",
        CLIP,
        16 + 4 * (8 + 1),
        _tiled,
        {"image_grid_pinpoints": [[16, 32], [32, 16]]},
        {"sliding_window": WINDOW},
    ),
    "llava_onevision": VisionFamily(
        "LlavaOnevisionConfig",
        "qwen2",
        SIGLIP,
        16 + 4 * (8 + 1),
        _tiled,
        {
            "image_grid_pinpoints": [[16, 32], [32, 16]],
            "vision_feature_select_strategy": "full",
            "video_token_index": 59,
        },
    ),
    "qwen2_vl": VisionFamily(
        "Qwen2VLConfig",
        "",
        {**QWEN, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        6,
        _gridded,
        text_options={"rope_parameters": ROPE},
        types="mm_token_type_ids",
    ),
    "qwen2_5_vl": VisionFamily(
        "Qwen2_5_VLConfig",
        "",
        {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
        6,
        _gridded,
        text_options={"rope_parameters": ROPE},
        types="mm_token_type_ids",
    ),
    "qwen3_vl": VisionFamily(
        "Qwen3VLConfig",
        "",
        {**QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        6,
        _gridded,
        text_options={"rope_parameters": {**ROPE, "mrope_interleaved": True}, "head_dim": 8},
        types="mm_token_type_ids",
    ),
    "gemma3": VisionFamily(
        "Gemma3Config",
        "",
        SIGLIP,
        4,
        _square,
        {"mm_tokens_per_image": 4},
        GEMMA,
        types="token_type_ids",
    ),
    "gemma4": VisionFamily(
        "Gemma4Config",
        "",
        {
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        4,
        _placed,
        {"audio_config": None, "video_token_id": 59, "audio_token_id": 58},
        {
            **GEMMA,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
            "pad_token_id": 0,
        },
        types="mm_token_type_ids",
    ),
    "idefics3": VisionFamily(
        "Idefics3Config",
        "llama",
        {**TOWER, "model_type": "idefics3_vision"},
        4,
        _listed,
        {"scale_factor": 2},
    ),
    "smolvlm": VisionFamily(
        "SmolVLMConfig",
        "llama",
        {**TOWER, "model_type": "smolvlm_vision"},
        4,
        _listed,
        {"scale_factor": 2},
    ),
    "paligemma": VisionFamily(
        "PaliGemmaConfig",
        "gemma",
        {**SIGLIP, "projection_dim": 32},
        16,
        _square,
        {"projection_dim": 32},
        {"head_dim": 8},
        types="token_type_ids",
        prefix=True,
    ),
    "internvl": VisionFamily(
        "InternVLConfig",
        "qwen2",
        {**TOWER, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
        4,
        _square,
        {"image_seq_length": 4},
    ),
    "mistral3": VisionFamily(
        "Mistral3Config",
        "mistral",
        {**TOWER, "model_type": "pixtral", "head_dim": 8},
        4,
        _sized,
        {"spatial_merge_size": 2},
        {"head_dim": 8},
    ),
    "pixtral": VisionFamily(
        "LlavaConfig",
        "mistral",
        {**TOWER, "model_type": "pixtral", "head_dim": 8},
        16,
        _sized,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"head_dim": 8},
    ),
}


def config_of(name: str, **text_changes: Any) -> Any:
    """Returns the family's tiny configuration."""
    family = FAMILIES[name]
    kind: Any = getattr(transformers, family.config)
    text = {**BASE, "max_position_embeddings": CONTEXT, **family.text_options, **text_changes}
    if family.text:
        text["model_type"] = family.text
    marks = {
        key: value
        for key, value in {
            "image_token_index": PLACEHOLDER,
            "image_token_id": PLACEHOLDER,
            "video_token_id": 59,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "boi_token_id": START,
            "eoi_token_id": END,
            "boi_token_index": START,
            "eoi_token_index": END,
        }.items()
        if key in _arguments(kind) or key in family.options
    }
    return kind(
        text_config=text,
        vision_config=dict(family.vision),
        tie_word_embeddings=False,
        **{**marks, **family.options},
    )


def _arguments(kind: Any) -> set[str]:
    import inspect

    return set(inspect.signature(kind.__init__).parameters)


def build(name: str, seed: int = 1, **text_changes: Any) -> Any:
    """Returns a new model of the family with random weights that depend on the seed only."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(
        config_of(name, **text_changes),
        attn_implementation=family.attention,
        dtype=torch.float64,
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                if not weight.any():  # Gemma 3 would see nothing
                    weight.normal_(std=0.02)
                weight.mul_(family.scale)
    return model


@cache
def target(name: str) -> Any:
    """Returns the family's model, shared by all tests: do not change it."""
    return build(name)


def with_image(name: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Returns the inputs that a processor makes of a prompt, each tensor for one row."""
    family = FAMILIES[name]
    ids: list[int] = []
    for token in prompt:
        ids += [START, *[PLACEHOLDER] * family.features, END] if token == IMAGE else [token]
    images = sum(token == IMAGE for token in prompt)
    found: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if not images:
        return found
    found |= family.made(images)
    if family.types is not None:
        types = torch.tensor([[int(token == PLACEHOLDER) for token in ids]])
        found[family.types] = torch.zeros_like(types) if family.prefix else types
    return found


PROMPTS = (
    [5, 6, IMAGE, 7, 8],
    [9, 10, 11],
    [IMAGE, 3, 4, 5, IMAGE, 12, 13],
    [2, 3] * 6,
)
"""Ragged: with one image, with two, and without any."""


@cache
def plain(name: str, length: int) -> list[list[int]]:
    """Returns what transformers' own greedy generate makes of each of `PROMPTS` alone."""
    texts = []
    for prompt in PROMPTS:
        inputs = with_image(name, prompt)
        made = target(name).generate(
            **inputs, max_new_tokens=length, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        texts.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    return texts
