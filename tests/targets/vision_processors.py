"""Processors for the tiny vision-language models, made without any file: a tokenizer of single
characters, and the image processors of the real families."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models

from .families import BASE
from .vision_families import FAMILIES, QWEN, ROPE, config_of

SPECIAL = (
    *("<pad>", "<s>", "</s>", "<unk>", "<image>"),
    *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
)
VOCABULARY = (*SPECIAL, *(chr(code) for code in range(32, 127)), "\n")

TEMPLATE = """{%- for message in messages -%}
{{ message['role'] + ': ' }}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}PLACE{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{{ '|' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
"""Contents are lists of parts, as in the templates of most vision-language models."""

TEXTS_ONLY = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '|' }}"
    "{% endfor %}{{ 'assistant: ' }}"
)
"""Contents are texts, as in older templates."""


@cache
def tokenizer() -> Any:
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    letters = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    letters.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[4:]),
    )


def llava_processor(template: str = TEMPLATE) -> Any:
    pixels = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    return transformers.LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=template.replace("PLACE", "<image>"),
    )


def llava() -> Any:
    """Returns a LLaVA with the tokens of `tokenizer`."""
    config = config_of("llava", vocab_size=len(VOCABULARY))
    config.image_token_index = config.image_token_id = VOCABULARY.index("<image>")
    return _random("LlavaForConditionalGeneration", config)


def save_qwen(folder: Path) -> Any:
    """Saves a Qwen2-VL with all that comes with one, and returns the model."""
    marks = {
        "image_token_id": VOCABULARY.index("<|image_pad|>"),
        "video_token_id": VOCABULARY.index("<|video_pad|>"),
        "vision_start_token_id": VOCABULARY.index("<|vision_start|>"),
        "vision_end_token_id": VOCABULARY.index("<|vision_end|>"),
    }
    text = {**BASE, "vocab_size": len(VOCABULARY), "max_position_embeddings": 256}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": ROPE},
        vision_config={**QWEN, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        tie_word_embeddings=False,
        **marks,
    )
    model = _random("Qwen2VLForConditionalGeneration", config)
    model.save_pretrained(folder)
    words = tokenizer()
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    words.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", place))
    transformers.Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 1024},
    ).save_pretrained(folder)
    return model


def picture(colour: tuple[int, int, int] = (200, 30, 60)) -> Any:
    """Returns an image that is not of one colour only."""
    image = Image.new("RGB", (20, 30), colour)
    image.paste((10, 240, 90), (3, 4, 12, 20))
    return image


def _random(kind: str, config: Any) -> Any:
    torch.manual_seed(1)
    model = getattr(transformers, kind)(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(FAMILIES["llava"].scale)
    model.generation_config.eos_token_id = None
    return model
