"""Ways to split a text before merging, alone and beside llama.cpp's."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from outpace.bench.peers.llamacpp import LLAMA_CPP, LlamaServer
from outpace.targets.hf.gguf.pretokenizers import SPLITS
from outpace.targets.hf.gguf.tokenizers import SPELLING, splitter
from outpace.targets.hf.loading.reading import read_tokenizer
from targets.gguf.files import tiny, write
from targets.gguf.words import BYTES

MIXED = "It'S 12345 aBc  x\n\n   y!?\n\u4f60\u597d\u3002(z) v1,\u00e9"
MORE = "'tis e\u0301 I'm\r\n/ hi!\r\n\n       z Ba'Dx  7$`"
"""Texts of which nearly every way makes other pieces."""
PIECES: Mapping[str, tuple[str, str]] = {
    "gpt-2": (
        "It|'|S| 12345| aBc| | x|\n\n  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'t|is| e|\u0301| I|'m|\r|\n|/| hi|!|\r\n\n      | z| Ba|'|Dx| | 7|$`",
    ),
    "default": (
        "It|'|S| |123|45| aBc| | x|\n\n  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'|tis| e|\u0301| I|'|m|\r\n|/| hi|!|\r\n\n      | z| Ba|'|Dx| | |7|$|`",
    ),
    "starcoder": (
        "It|'|S| |1|2|3|4|5| aBc| | x|\n\n  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'t|is| e|\u0301| I|'m|\r|\n|/| hi|!|\r\n\n      | z| Ba|'|Dx|  |7|$`",
    ),
    "falcon": (
        "It|'|S| |123|45| aBc| | x|\n\n  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'|tis| e|\u0301| I|'|m|\r\n|/| hi|!|\r\n\n      | z| Ba|'|Dx| | 7|$`",
    ),
    "llama3": (
        "It|'S| |123|45| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'D|x| | |7|$`",
    ),
    "minicpm5": (
        "It|'S| |123|45| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'D|x|  |7|$`",
    ),
    "jais-2": (
        "It|'S| |123|45| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r\n|/| hi|!\r\n\n|    |  | z| Ba|'D|x| | |7|$`",
    ),
    "tekken": (
        "It|'S| |1|2|3|4|5| a|Bc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'tis| e\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'Dx| | |7|$`",
    ),
    "qwen2": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'D|x| | |7|$`",
    ),
    "laguna": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r|\n|/| hi|!\r|\n\n|      | z| Ba|'D|x| | |7|$`",
    ),
    "qwen35": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'D|x| | |7|$`",
    ),
    "seed-coder": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r\n|/| hi|!|\r\n\n|      | z| Ba|'D|x| | |7|$`",
    ),
    "ufakzeka": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'tis| e|\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'Dx| | |7|$`",
    ),
    "exaone-moe": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is e\u0301 I|'m|\r\n|/| hi|!\r|\n\n|      | z Ba|'D|x| | |7|$`",
    ),
    "bailingmoe": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'t|is| e|\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'D|x| | |7|$`",
    ),
    "gpt-4o": (
        "It'S| |123|45| a|Bc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'tis| e\u0301| I'm|\r\n|/| hi|!\r\n\n|      | z| Ba'D|x| | |7|$`",
    ),
    "tiny_aya": (
        "It'S| |12|345| a|Bc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,\u00e9",
        "'tis| e\u0301| I'm|\r\n|/| hi|!\r\n\n|      | z| Ba'D|x|  |7|$`",
    ),
    "youtu": (
        "It'S| |1|2|3|4|5| a|Bc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002|(z|)| v|1|,\u00e9",
        "'tis| e\u0301| I'm|\r\n|/| hi|!\r\n\n|      | z| Ba'D|x| | |7|$`",
    ),
    "bloom": (
        "It'S| 12345| aBc| | x|\n\n  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v1|,|\u00e9",
        "'tis| e\u0301| I'm|\r\n|/| hi|!\r\n\n      | z| Ba'Dx| | 7$`",
    ),
    "viking": (
        "It'S| |1|2|3|4|5| aBc| | x|\n\n  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'tis| e\u0301| I'm|\r\n|/| hi|!\r\n\n      | z| Ba'Dx| | |7|$`",
    ),
    "deepseek-llm": (
        "It|'|S| |12345| aBc| | x|\n|\n|  | y|!?|\n|\u4f60\u597d|\u3002|(|z|)| v|1|,|\u00e9",
        "'|tis| e|\u0301| I|'|m|\r|\n|/| hi|!|\r|\n|\n|      | z| Ba|'|Dx|  |7|$`",
    ),
    "deepseek-coder": (
        "It|'|S| |1|2|3|4|5| aBc| | x|\n|\n|  | y|!?|\n|\u4f60\u597d|\u3002|(|z|)| v|1|,|\u00e9",
        "'|tis| e|\u0301| I|'|m|\r|\n|/| hi|!|\r|\n|\n|      | z| Ba|'|Dx|  |7|$`",
    ),
    "deepseek-v3": (
        "It|'S| |123|45| aBc| | x|\n\n|  | y|!?\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'tis| e\u0301| I|'m|\r\n|/| hi|!\r\n\n|      | z| Ba|'Dx|  |7|$`",
    ),
    "spark2_5": (
        "It|'S| |1|2|3|4|5| aBc| | x|\n|\n|  | y|!?|\n|\u4f60\u597d|\u3002(|z|)| v|1|,|\u00e9",
        "'tis| e\u0301| I|'m|\r|\n|/| hi|!|\r|\n|\n|      | z| Ba|'Dx|  |7|$`",
    ),
    "chameleon": (
        "It|'|S| |1|2|3|4|5| aBc|  |x|\n|\n|  | y|!|?|\n|\u4f60\u597d|\u3002|(|z|)| v|1|,|\u00e9",
        "'|tis| e|\u0301| I|'|m|\r|\n|/| hi|!|\r|\n|\n|    |  | z| Ba|'|Dx|  |7|$|`",
    ),
}
"""The pieces of both texts, by the first name of each way."""
TEXTS = (
    "1", "12", "123", "1234", "12345", "123456", "1234567", "a1234b", "x 12345", "3.14159", "1,234",
    "\u0661\u0662\u0663\u0664", "\u00bd\u00b2", "it's", "IT'S", "we'Ll go", "x'dy", "'tis",
    "o'clock", "l'\u00e9t\u00e9", "\u4f60\u597d\u4e16\u754c", "\u4f60\u597dhi\u4f60",
    "\u65e5\u672c\u306e\u30c6", "\ud55c\uad6d \uc5b4", "\u3105\u3106a", "\u4f60\u3002\u597d\uff01",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u0645\u0631\u062d\u0628\u0627\u060c \u0628",
    "\u0915\u094d\u0937\u0947\u0964\u0915", "caf\u00e9 n", "cafe\u0301 n", "e\u0301\u0300x",
    "\u03b1\u03b2\u0393 \u03b4", "\u0411\u0430\u041d\u043a", "camelCase", "HTTPServer", "aBc DeF",
    "XMLa", "  a", "a  b", "a   b", "a    b", "     ", "a \tb", "\t\tx", "a\nb", "a\n\nb", "a \n b",
    "a\n  b", "a  12", "\r\n\r\nx", "a  \n", "x\n\n", "   \n\n  x", "...", "a...b", "hi!?\n",
    "a.b,c", "(x)", " (x) ", "$5+6", "a=b", "<=>^~|`", "#tag", "@me", "_x_y", "/a/b", "a//\n",
    "-\n-", "x-y", "\U0001f600a", "a \U0001f600\U0001f600", "\u2018q\u2019", "\u00abq\u00bb",
    "a\u00a0b", "a\u3000b", "\u2028a", " \u4f60 \u597d", "\U0001d400b", "<sentinel:1>", "IMGIMGABZ",
    MIXED, MORE,
)  # fmt: skip
"""Texts that are split otherwise by one way than by another."""


UNMADE = "qzq"
"""A token to which no merge leads."""


def spelt(piece: str) -> str:
    return "".join(SPELLING[byte] for byte in piece.encode())


def whole_pieces() -> tuple[list[str], list[str]]:
    """Returns tokens and merges by which each piece of the texts becomes one token: those of all
    parts of a text, made of any two parts of it."""
    tokens: dict[str, None] = dict.fromkeys(BYTES)
    merges: dict[str, None] = {}
    for text in map(spelt, TEXTS):
        size = len(text)
        for first, last in itertools.combinations(range(size + 1), 2):
            tokens[text[first:last]] = None
            for cut in range(first + 1, last):
                merges[f"{text[first:cut]} {text[cut:last]}"] = None
    return [*tokens, UNMADE], list(merges)


CAPITALS = ("\u03b1\u03b2\u0393 \u03b4", "\u0411\u0430\u041d\u043a")
MARKS = (
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u0915\u094d\u0937\u0947\u0964\u0915", "cafe\u0301 n",
    "e\u0301\u0300x", MORE,
)  # fmt: skip
CAMELS = ("camelCase", "aBc DeF", MIXED)
DIGITS = ("a1234b", "a  12", MORE)
SPACES = ("a\u3000b", "\u2028a")
OTHERWISE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (*CAPITALS, *MARKS)
    ),
    "granite-embed-multi-97m": CAPITALS,
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (*CAPITALS, *CAMELS, *DIGITS)),
    "youtu": (*CAPITALS, *CAMELS),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), SPACES),
}
"""Texts that llama.cpp splits otherwise than the tokenizers that the names stand for. Its engine
knows no capitals but those of ASCII, and by some expressions not even these; it takes marks for no
letters, spaces of other scripts for plain ones, and puts what stands before digits to them."""
UNKNOWN_THERE = frozenset({"gpt2"})
"""Names that llama.cpp does not have."""


def pieces(split: str, text: str) -> list[str]:
    """Returns the pieces of a text, in their bytes' spelling."""
    return [piece for piece, _ in splitter(split).pre_tokenize_str(text)]


@pytest.mark.parametrize("split", SPLITS)
def test_pieces(split: str) -> None:
    first = next(name for name in PIECES if SPLITS[name] == SPLITS[split])
    for text, expected in zip((MIXED, MORE), PIECES[first], strict=True):
        assert pieces(split, text) == [spelt(piece) for piece in expected.split("|")]


def test_every_way_has_its_pieces() -> None:
    assert {SPLITS[name] for name in PIECES} == set(SPLITS.values())


def written(folder: Path, split: str | None) -> Path:
    ordinary, merges = whole_pieces()
    tokens = [*ordinary, "<|begin|>"]
    said = {
        "pre": split,
        "tokens": tokens,
        "token_type": [1] * len(ordinary) + [3],
        "merges": merges,
        "bos_token_id": len(ordinary),
        "add_bos_token": None,
        "eos_token_id": None,
        "padding_token_id": None,
    }
    changes = {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    model = tiny("qwen2", vocab_size=len(tokens), num_hidden_layers=1)
    return write(folder / "model.gguf", "qwen2", model, changes=changes)


@pytest.mark.skipif(
    LLAMA_CPP.variable not in os.environ, reason=f"needs llama.cpp in {LLAMA_CPP.variable}"
)
@pytest.mark.parametrize("split", [name for name in SPLITS if name not in UNKNOWN_THERE])
def test_pieces_are_those_of_llamacpp(split: str, tmp_path: Path) -> None:
    path = written(tmp_path, split)
    ours = read_tokenizer(str(path), False)
    with closing(LlamaServer(LLAMA_CPP, str(path), None, 0, 1)) as server:
        texts = (*TEXTS, UNMADE)
        unlike = [text for text in texts if ours(text).input_ids != server.tokens(text)]
    assert set(unlike) == set(OTHERWISE.get(split, ()))


def test_a_file_that_names_no_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = written(tmp_path, "default").rename(tmp_path / "named.gguf")
    path = written(tmp_path, None)
    with caplog.at_level(logging.WARNING, "outpace"):
        found, expected = (read_tokenizer(str(each), False) for each in (path, named))
    assert [found(text).input_ids for text in TEXTS] == [expected(text).input_ids for text in TEXTS]
    assert caplog.text.count("does not say how it splits texts; they are split as llama.cpp") == 1
