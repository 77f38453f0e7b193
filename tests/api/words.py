"""A tokenizer of one token per word, for models with the 64 tokens of `targets.families`."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from targets.families import VOCABULARY

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'odd' %}{{ raise_exception('no odd role') }}"
    "{% endif %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
)


def word_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Returns a tokenizer of "user", "system" and words w3 ... w63, which pads on the left."""
    words = ["<unk>", "user", "system", *(f"w{number}" for number in range(3, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<unk>",
        padding_side="left",
        chat_template=template,
    )
