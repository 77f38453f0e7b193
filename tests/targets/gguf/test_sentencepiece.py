"""Vocabularies of sentencepiece's kind: how spaces are marked, which pieces are put together."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outpace.bench.peers.llamacpp import LLAMA_CPP, LlamaServer
from outpace.targets.hf.gguf.tokenizers import SPACE
from outpace.targets.hf.loading.reading import read_tokenizer
from targets.gguf.files import tiny, write

BYTES = {f"<0x{byte:02X}>": 6 for byte in range(256)}
ADDED = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 3, "<tool>": 4}
PIECES = [
    SPACE, "h", "e", "l", "o", "t", "he", "ll", "hell", "hello", "th", f"{SPACE}t", f"{SPACE}th",
    f"{SPACE}hello", SPACE * 2, SPACE * 3,
]  # fmt: skip
TYPES = {**ADDED, **BYTES, **dict.fromkeys(PIECES, 1)}
SCORES = [0.0] * (len(TYPES) - len(PIECES)) + [-float(n) for n in range(len(PIECES))]


def written(folder: Path, arch: str, **changes: Any) -> Path:
    said = {
        "model": "llama",
        "pre": "default",
        "tokens": list(TYPES),
        "token_type": list(TYPES.values()),
        "scores": SCORES,
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": None,
        "add_bos_token": None,
        **changes,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    model = tiny(arch, vocab_size=len(said["tokens"]))
    return write(folder / "model.gguf", arch, model, changes=named)


def tokens_of(path: Path, text: str) -> list[str]:
    tokenizer = read_tokenizer(str(path), trust_remote_code=False)
    ids: list[int] = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == plain(text)
    return [list(TYPES)[number] for number in ids]


def plain(text: str) -> str:
    return text.replace("</s>", "").strip()


@pytest.mark.parametrize(
    ("arch", "text", "tokens"),
    [
        ("llama", "hello the", [f"{SPACE}hello", f"{SPACE}t", "he"]),
        ("llama", "hello</s>", [f"{SPACE}hello", "</s>"]),
        ("llama", "l<tool>l", [SPACE, "l", "<tool>", "l"]),
        ("llama", "\u00e9", [SPACE, "<0xC3>", "<0xA9>"]),
        ("llama", " hello", [f"{SPACE}hello"]),
        ("phi3", " hello", [SPACE, f"{SPACE}hello"]),
        ("gemma3", "hello the", ["hello", f"{SPACE}t", "he"]),
    ],
)
def test_pieces_of_a_text(arch: str, text: str, tokens: list[str], tmp_path: Path) -> None:
    assert tokens_of(written(tmp_path, arch), text) == ["<s>", *tokens]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("<|user|>\nhello</s>\n<|user|>\n", ["<|user|>", f"{SPACE}hello", "</s>", "<|user|>"]),
        ("<s>\nhello", ["<s>", SPACE, "<0x0A>", "hello"]),
        ("<tool>\n hello", ["<tool>", f"{SPACE}hello"]),
    ],
)
@pytest.mark.parametrize("end", [3, 4])
def test_added_tokens_of_phi3_take_the_blanks_after_them(
    text: str, tokens: list[str], end: int, tmp_path: Path
) -> None:
    """As of microsoft/Phi-3-mini-4k-instruct, whose tokenizer.json says so. end: the type of
    ``</s>``."""
    types = [end if token == "</s>" else kind for token, kind in TYPES.items()]
    path = written(tmp_path, "phi3", token_type=types)
    tokenizer = read_tokenizer(str(path), trust_remote_code=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [list(TYPES)[number] for number in ids] == tokens


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_a_file_may_forbid_the_space_in_front(arch: str, tmp_path: Path) -> None:
    path = written(tmp_path, arch, add_space_prefix=False)
    assert tokens_of(path, "hello the") == ["<s>", "hello", f"{SPACE}t", "he"]
    assert tokens_of(written(tmp_path, arch, add_space_prefix=True), "hello") == [
        "<s>", f"{SPACE}hello",
    ]  # fmt: skip


def test_special_tokens_that_a_file_lacks_are_texts(tmp_path: Path) -> None:
    """As Yi's, which are called otherwise."""
    names = {"<s>": "<|startoftext|>", "</s>": "<|endoftext|>"}
    tokens = [names.get(token, token) for token in TYPES]
    tokens[tokens.index("<tool>")] = "s"
    tokens[tokens.index("<|user|>")] = "<"
    tokens[tokens.index(f"{SPACE}th")] = ">"
    types = [
        1 if token in ("s", "<", ">") else kind
        for token, kind in zip(tokens, TYPES.values(), strict=True)
    ]
    path = written(tmp_path, "llama", tokens=tokens, token_type=types)
    tokenizer = read_tokenizer(str(path), trust_remote_code=False)
    ids = tokenizer("<s>hello</s>").input_ids
    assert max(ids) < len(tokens)
    assert ids[0] == tokens.index("<|startoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<s>hello</s>"


def test_a_file_may_forbid_the_token_of_beginning(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", add_bos_token=False)
    assert tokens_of(path, "hello") == [f"{SPACE}hello"]
    path = written(tmp_path, "llama", add_bos_token=True, add_eos_token=True)
    assert tokens_of(path, "hello") == ["<s>", f"{SPACE}hello", "</s>"]


def test_gemmas_spaces_are_spelt_as_spaces_in_a_file(tmp_path: Path) -> None:
    tokens = [token.replace(SPACE, " ") if set(token) == {SPACE} else token for token in TYPES]
    path = written(tmp_path, "gemma3", tokens=tokens)
    assert tokens_of(path, "l   l") == ["<s>", "l", SPACE * 3, "l"]


@pytest.mark.skipif(
    LLAMA_CPP.variable not in os.environ, reason=f"needs llama.cpp in {LLAMA_CPP.variable}"
)
def test_pieces_are_those_of_llamacpp(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    ours = read_tokenizer(str(path), False)
    texts = ("hello the", "l", "hello  th", "th\u00e9\nhell   l", "ellotlhe", "hello</s>")
    with closing(LlamaServer(LLAMA_CPP, str(path), None, 0, 1)) as server:
        for text in texts:
            assert ours(text).input_ids == server.tokens(text), text
