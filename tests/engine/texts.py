"""A byte-level tokenizer and models over it, for everything that is about text."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace import LLM
from targets.families import build, noised

END = 256
SIZE = 257


@cache
def tokenizer() -> Any:
    """Returns a tokenizer with one token for each byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", clean_up_tokenization_spaces=False
    )


def ids_of(text: str) -> list[int]:
    """Returns one token per byte."""
    ids: list[int] = tokenizer()(text).input_ids
    return ids


@cache
def writer(vocabulary: int = SIZE) -> Any:
    """Returns a random model over the bytes (and, with a larger vocabulary, some padding)."""
    model = build("llama", vocab_size=vocabulary)
    model.generation_config.eos_token_id = END
    return model


@cache
def helper(vocabulary: int = SIZE) -> Any:
    """Returns a drafter for `writer`."""
    return noised(writer(vocabulary), 0.05)


def text_decoder(method: str = "draft_model", k: int = 4, rows: int = 4, **more: Any) -> LLM:
    """Returns an LLM that writes text."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": k, **more}
    if method == "draft_model":
        config.setdefault("model", helper())
        config.setdefault("tokenizer", tokenizer())
    return LLM(writer(), tokenizer=tokenizer(), speculative_config=config, max_num_seqs=rows)


def spelled(text: str) -> Any:
    """Returns a logits processor that makes the text come out, whatever the model wants.

    It follows the prompt "go:" and then goes on with what the model wants.
    """
    start, letters = len(ids_of("go:")), ids_of(text)

    def spell(history: Any, scores: Any) -> Any:
        place = history.shape[1] - start
        if not 0 <= place < len(letters):
            return scores
        forced = scores.clone()
        forced[:, letters[place]] = scores.max() + 100
        return forced

    return spell
