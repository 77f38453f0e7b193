"""How texts are split before merging, by the name that a GGUF file gives the way.

The names and expressions are llama.cpp's (``src/llama-vocab.cpp``), written as `tokenizers` takes
them.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""What is written behind an apostrophe in English."""
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALISED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
"""Words that end where a capital letter follows a small one."""

_LLAMA3 = _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = (
    _ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
)
_TEKKEN = "|".join([*_CAPITALISED, r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES])
_GPT4O = "|".join(
    [
        *(word + _ENDING + "?" for word in _CAPITALISED),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    ]
)

_NAMED: Mapping[str, str] = {
    _LLAMA3: (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
        "smaug-bpe"
    ),
    _TEKKEN: "tekken",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez",
    _QWEN35: "qwen35",
    _GPT4O: "gpt-4o llama4 kanana2 talkie minimax-m2",
}
SPLITS: Mapping[str, str] = {
    name: expression for expression, names in _NAMED.items() for name in names.split()
}
"""Expressions by the names of ways to split. GPT-2's own is not among them."""
