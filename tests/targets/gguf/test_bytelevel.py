"""Byte-level vocabularies: tokens that were added to them are whole, whatever they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.errors import ModelLoadError
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.reading import read_tokenizer
from targets.gguf.files import tiny, write
from targets.gguf.words import BYTES, MERGES, VOCABULARY

BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
ORDINARY = [*BYTES, *("".join(merge.split()) for merge in MERGES)]
ADDED = {BEGIN: 3, END: 3, USER: 3, "<think>": 4, "<|caf\u00e9|>": 4, "<|se\u00f1or.|>": 3, "  ": 4}
"""Added tokens as llama.cpp's converter writes them, with their types."""
TEMPLATE = (
    "{% for m in messages %}" + USER + "{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


def number(token: str) -> int:
    return [*ORDINARY, *ADDED].index(token)


def vocabulary(**changes: Any) -> dict[str, Any]:
    """Returns what a file of DeepSeek's kind says of its tokenizer."""
    more = [f"[PAD{at}]" for at in range(VOCABULARY - len(ORDINARY) - len(ADDED))]
    said = {
        "tokens": [*ORDINARY, *ADDED, *more],
        "token_type": [1] * len(ORDINARY) + list(ADDED.values()) + [5] * len(more),
        "pre": "deepseek-r1-qwen",
        "bos_token_id": number(BEGIN),
        "eos_token_id": number(END),
        "padding_token_id": number(END),
        "add_bos_token": True,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in said.items()}


def written(folder: Path, **changes: Any) -> Path:
    said = {**vocabulary(**changes), "tokenizer.chat_template": TEMPLATE}
    return write(folder / "model.gguf", "qwen2", tiny("qwen2"), changes=said)


def tokenizer_with(folder: Path, **changes: Any) -> Any:
    return read_tokenizer(str(written(folder, **changes)), trust_remote_code=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return read_tokenizer(str(path), trust_remote_code=False)


@pytest.mark.parametrize("token", ADDED)
def test_added_tokens_are_whole_in_a_text(token: str, tokenizer: Any) -> None:
    ids = tokenizer(f"he{token}he", add_special_tokens=False).input_ids
    assert ids == [number("he"), number(token), number("he")]
    assert tokenizer.decode(ids) == f"he{token}he"
    shown = "" if ADDED[token] == 3 else token
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"he{shown}he"


def test_the_other_tokens_are_spelt(tokenizer: Any) -> None:
    text = "he \u00fcber caf\u00e9 se\u00f1or \u4e2d\u6587 <|User|>"
    ids = tokenizer(text).input_ids
    assert (ids[0], max(ids[1:]) < len(ORDINARY)) == (number(BEGIN), True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_no_token_is_beyond_the_list(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (number(BEGIN), number(END))
    assert len(tokenizer) == VOCABULARY
    ids = tokenizer("<|endoftext|>").input_ids  # GPT-2's, which this vocabulary does not have
    assert max(ids) < len(ORDINARY) + len(ADDED)


def test_chats_have_the_tokens_that_the_template_names(path: Path) -> None:
    llm = LLM(path)
    output = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [number(USER), number("hello"), number("<think>")]
    assert llm.target.eos_ids == (number(END),)


def test_special_tokens_without_types_are_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, token_type=None)
    ids = tokenizer("he" + END).input_ids
    assert ids == [number(BEGIN), number("he"), number(END)]


def test_an_added_token_that_is_written_as_another_is_spelt(tmp_path: Path) -> None:
    """The byte 0xE9 is written so, of which Chinese characters are made."""
    tokens = [*ORDINARY, "\u00e9", *ADDED]
    types = [1] * len(ORDINARY) + [4, *ADDED.values()]
    more = {"bos_token_id": None, "eos_token_id": None, "padding_token_id": None}
    tokenizer = tokenizer_with(tmp_path, tokens=tokens, token_type=types, **more)
    for text in ("caf\u00e9", "\u9a6c"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_an_ordinary_token_named_as_padding_is_shown(tmp_path: Path) -> None:
    mark = number("!")
    tokenizer = tokenizer_with(tmp_path, padding_token_id=mark, unknown_token_id=mark)
    ids = tokenizer("he!").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he!"


@pytest.mark.parametrize(
    ("split", "ids"),
    [
        ("llama-bpe", ["heh"]),
        ("glm4", ["heh"]),
        ("chatglm-bpe", ["he", "h"]),
        ("qwen2", ["he", "h"]),
    ],
)
def test_words_that_no_merge_leads_to(split: str, ids: list[str], tmp_path: Path) -> None:
    """llama.cpp takes them for the tokenizers of which Llama 3's is one."""
    tokens = [*ORDINARY, "heh"]
    more = {"bos_token_id": None, "eos_token_id": None, "padding_token_id": None}
    tokenizer = tokenizer_with(tmp_path, tokens=tokens, token_type=None, pre=split, **more)
    assert tokenizer("heh").input_ids == [tokens.index(token) for token in ids]


def test_a_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="a byte-level tokenizer without its merges"):
        load(written(tmp_path, merges=None))
