"""Tiny random models whose tokens are letters, for audits that are given no model."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklm"
END = "<end>"
CONTEXT = 512
"""The models' context length: enough for texts that outgrow the first cache buffers."""
WINDOW = 4
"""Tokens that the family with sliding windows looks back at: far below the length of the texts."""
PADDED = 18
"""Rows of the models' heads: more than there are tokens, as real models have them too."""


END_ID = len(LETTERS)
"""The number of the token that ends a text; those of letters are their places."""


class LetterTokenizer(PreTrainedTokenizerFast):
    """A tokenizer with one token per letter and one that ends the text. It leaves out what is no
    letter."""

    def __init__(self) -> None:
        one_each = models.BPE({letter: number for number, letter in enumerate(LETTERS)}, [])
        made = Tokenizer(one_each)
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        super().__init__(tokenizer_object=made, eos_token=END)  # type: ignore[no-untyped-call]


def letter_model(family: str = "llama", seed: int = 1, scale: float = 5.0) -> Any:
    """Returns a random float64 model of the letters, the same for the same seed.

    family: "llama", or "mistral" for one with a sliding window. All weights are scaled up, and
    those of head, queries and keys once more: with the usual initialisation all tokens are about
    equally probable whatever the text is, and a cache full of wrong tokens would go unnoticed.
    """
    options: dict[str, Any] = {
        "vocab_size": PADDED,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        config: Any = transformers.MistralConfig(**options, sliding_window=WINDOW)
    else:
        config = transformers.LlamaConfig(**options)
    # Weights from a generator of their own: what the caller draws elsewhere stays the same.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                sharp = any(part in name for part in ("lm_head", "q_proj", "k_proj"))
                weight.mul_(4 * scale if sharp else scale)
    return model
