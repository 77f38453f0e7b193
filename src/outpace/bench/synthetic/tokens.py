"""A byte-level tokenizer for synthetic models: any text in, made-up words out."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outpace.bench.library import transformers

_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
SPECIAL = "<|endoftext|>"


def word(number: int) -> str:
    """Returns the made-up word of a number; different numbers give different words.

    >>> word(0), word(81)
    ('baba', 'bebe')
    """
    syllables = len(_CONSONANTS) * len(_VOWELS)
    text = ""
    while number or len(text) < 4:
        number, digit = divmod(number, syllables)
        consonant, vowel = divmod(digit, len(_VOWELS))
        text += _CONSONANTS[consonant] + _VOWELS[vowel]
    return text


def byte_tokenizer(vocabulary: int) -> Any:
    """Returns a tokenizer in which every id of the vocabulary has a text.

    Ids 0-255 are the bytes, into which every text is encoded; 256 is the padding; the rest are
    words that appear in generated texts only. No id ends a text.
    """
    # Sorted, so that the same byte has the same id in every process.
    entries = {
        char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    entries[SPECIAL] = len(entries)
    for number in range(vocabulary - len(entries)):
        entries["Ġ" + word(number)] = len(entries)
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL)
