"""Small tokenizers of the kinds that models come with, trained on a few lines."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "Once upon a time there was a little girl who had a little red hat.",
    "The little dog ran to the park, and the girl ran after the dog.",
    "def total(values):\n    return sum(value for value in values)\n",
    "It was 1984; 12 of 365 days had been warm.",
    "Caf\u00e9 na\u00efve, \u65e5\u672c\u8a9e, \U0001f642!",
    "  two spaces,\ttabs and\n\nempty lines are text too.",
] * 3
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _wrapped(made: Tokenizer, cleans: bool = False, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=cleans, **special
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's: pairs of bytes are joined, and spaces belong to the words after them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    return _wrapped(made, eos_token="<|end|>")


def gpt2() -> PreTrainedTokenizerFast:
    """GPT-2's own 50,257 tokens, from the folder of data; skips the test where that is missing."""
    folder = Path(os.environ.get("OUTPACE_DATA", "")) / "tokenizers" / "gpt2"
    vocabulary, merges = folder / "encoder.json", folder / "vocab.bpe"
    if not vocabulary.exists():
        pytest.skip("needs OUTPACE_DATA/tokenizers/gpt2/encoder.json and vocab.bpe of GPT-2")
    made = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _wrapped(made, eos_token="<|endoftext|>")


@cache
def shuffled() -> PreTrainedTokenizerFast:
    """The same with other numbers, some tokens fewer and another end of text."""
    content = json.loads(byte_level().backend_tokenizer.to_str())
    merges = content["model"]["merges"][:-25]
    known = {*pre_tokenizers.ByteLevel.alphabet(), *("".join(pair) for pair in merges)}
    tokens = ["<eos>", *sorted(known)]
    random.Random(3).shuffle(tokens)
    made = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m) for m in merges])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _wrapped(made, eos_token="<eos>")


@cache
def pieces() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are marked, one comes before every text, and what is not in the
    vocabulary is spelt in bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _marking()
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(LINES, trainer)
    content = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in content["merges"]]
    made = Tokenizer(
        models.BPE(vocab=content["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = _marking()
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _wrapped(made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _marking() -> Any:
    return normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


@cache
def unigram() -> PreTrainedTokenizerFast:
    """As T5's or Gemma's: the most probable pieces, and bytes for what has none."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(LINES, trainer)
    scored = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    known = [(token, score) for token, score in scored if token not in "\u65e5\U0001f642"]
    made = Tokenizer(
        models.Unigram([*known, *((byte, -20.0) for byte in BYTES)], unk_id=0, byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _wrapped(made, eos_token="</s>", unk_token="<unk>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """As XLNet's: marks for spaces, of which the first is dropped, and no bytes."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return _wrapped(made, eos_token="</s>", unk_token="<unk>")


CONTRACTIONS = [
    "it's. isn't it? i'm here, we've gone! they're 'quoted' words' s n't",
    "she said: ' no ' . the night's n , the v're 'r 'v",
] * 3


def _wordpiece(*, cleans: bool, while_decoding: bool) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=while_decoding)
    trainer = trainers.WordPieceTrainer(
        vocab_size=260, special_tokens=["[UNK]", "[PAD]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator([*LINES, *CONTRACTIONS], trainer)
    return _wrapped(made, cleans, unk_token="[UNK]", eos_token="[SEP]")


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's: parts of words, and spaces between words, which are taken out again in front of
    punctuation when the whole text is there."""
    return _wordpiece(cleans=True, while_decoding=False)


@cache
def wordpiece_by_token() -> PreTrainedTokenizerFast:
    """The same, where spaces in front of punctuation are taken out token by token."""
    return _wordpiece(cleans=False, while_decoding=True)


@cache
def word_ends() -> PreTrainedTokenizerFast:
    """As GPT-1's: the ends of words are marked, and spaces are not."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<end>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator([*LINES, *CONTRACTIONS], trainer)
    return _wrapped(made, unk_token="<unk>", eos_token="<end>")


FAMILIES: Mapping[str, Any] = {
    "byte-level BPE": byte_level,
    "byte fallback": pieces,
    "Unigram with bytes": unigram,
    "Metaspace": metaspace,
    "WordPiece, cleaned up": wordpiece,
    "WordPiece": wordpiece_by_token,
    "BPE with ends of words": word_ends,
}
"""The families of tokenizers, by how they decode."""

KINDS: Mapping[str, Any] = {"shuffled": shuffled, "pieces": pieces, "unigram": unigram}
