"""The pair's byte-level BPE tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 8192
POSITIONS = 1024
END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL = [END_OF_TEXT, USER, ASSISTANT, END, PAD]

# There is no system role: the pair never saw one, so such a message is read as the user's.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- ('<|assistant|>' if message['role'] == 'assistant' else '<|user|>') + '\\n'"
    " + (message['content'] | trim) + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly `VOCABULARY` entries, digits apart, learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: Path) -> Tokenizer:
    """The tokenizer saved at `path`."""
    return Tokenizer.from_file(str(path))


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as `AutoTokenizer` knows it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
