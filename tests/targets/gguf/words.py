"""The vocabulary of the tiny models that are written to GGUF files."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = sorted(ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt h"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*BYTES, *("".join(merge.split()) for merge in MERGES), *CONTROL]
"""A vocabulary of single bytes, a few merges, and what chats need."""
VOCABULARY = len(TOKENS) + 7
"""Heads are often wider than what the tokenizer knows."""


def vocabulary() -> dict[str, Any]:
    more = [f"[PAD{number}]" for number in range(VOCABULARY - len(TOKENS))]
    types = [1] * (len(TOKENS) - len(CONTROL)) + [3] * len(CONTROL) + [5] * len(more)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*TOKENS, *more],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": TOKENS.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
