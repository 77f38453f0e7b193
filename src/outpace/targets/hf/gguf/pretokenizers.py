"""Pre-tokenizers by the names that GGUF files give them: how texts are split before merging.

A pre-tokenizer is a sequence of expressions, each of which is applied to the pieces that the
earlier ones have left: what it finds is a piece, and so is what stands between two finds. The names
are llama.cpp's (``src/llama-vocab.cpp``). The expressions are those of the tokenizers that the
names stand for, written as `tokenizers` takes them. llama.cpp has some in another form, because its
own engine does not know all that they ask for.

Not known here are pre-tokenizers for which llama.cpp has code of its own instead of expressions
(kimi-k2, afmoe, superbpe), and those of vocabularies that are not spelt in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""What is written after an apostrophe in English."""
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]|\s+(?!\S)|\s+"
"""Spaces as before, but each line ends a piece."""
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CAPITALISED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
"""Words that end where a capital letter follows a small one."""
_HALVINGS = "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))
"""Runs of spaces of 512, 256 and so on down to 4."""
_CHINESE = "\u4e00-\u9fa5"
_JAPANESE = "\u3040-\u309f\u30a0-\u30ff"
_CASED = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of scripts with capitals, as DeepSeek lists them."""
_WIDE_MARKS = (
    "\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f"
)
_STOPS = r"|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
"""What ends a piece of BLOOM's."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join([_ENDING, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES])
_JAIS2 = "|".join(
    [_ENDING, _WORD, r"\p{N}{1,3}", _MARKS, r"\s*[\r\n]+", _HALVINGS, r"\s{1,2}(?!\S)|\s{1}"]
)
_QWEN2 = "|".join([_ENDING, _WORD, r"\p{N}", _MARKS, _SPACES])
_QWEN35 = "|".join(
    [
        _ENDING,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _SPACES,
    ]
)
_TEKKEN = "|".join([*_CAPITALISED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES])
_GPT4O = "|".join(
    [
        *(word + _ENDING + "?" for word in _CAPITALISED),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    ]
)
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
_MINICPM5 = "|".join([_ENDING, _WORD, r"\p{N}+", _MARKS, _SPACES])
_SEED = "|".join([_ENDING, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES])
_UFAKZEKA = "|".join([_WORD, r"\p{N}", _MARKS, _SPACES])
_EXAONE_MOE = "|".join(
    [
        _ENDING,
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        _LINES,
    ]
)
_BAILING = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        _LINES,
    ]
)
_BLOOM = rf" ?[^(\s{_STOPS})]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    f"[{_CHINESE}{_JAPANESE}]+",
    rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPARK = (
    *_DEEPSEEK3[:2],
    rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    f"[{_CHINESE}\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK[4], r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

OF_LLAMA3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano",
)  # fmt: skip
"""Names of Llama 3's way for models whose vocabulary is used as Llama 3's is."""

_NAMED: Mapping[tuple[str, ...], str] = {
    (_GPT2,): (
        "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
        "modern-bert jina-es jina-de jina-v2-es jina-v2-de"
    ),
    _DEFAULT: "default",
    (r"\p{N}", _GPT2): ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    _FALCON: "falcon",
    (_LLAMA3,): " ".join(OF_LLAMA3) + " dbrx smaug-bpe chatglm-bpe glm4 glm5",
    (r"\p{N}{1,3}", _MINICPM5): "minicpm5",
    (_JAIS2,): "jais-2",
    (_TEKKEN,): "tekken",
    (_QWEN2,): ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (r"[^\n]+|[\n]+", _QWEN2): "laguna",
    (_QWEN35,): "qwen35",
    (_SEED,): "seed-coder",
    (_UFAKZEKA,): "ufakzeka",
    (_EXAONE_MOE,): "exaone-moe",
    (_BAILING,): "bailingmoe bailingmoe2 llada-moe",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O): "tiny_aya cohere2moe",
    (
        f"[\uac00-\ud7a3\u3131-\u318e]+|[{_WIDE_MARKS}]+|[\u3105-\u312f]+|[{_CHINESE}{_JAPANESE}]+",
        _YOUTU,
    ): "youtu",
    (_BLOOM,): "bloom poro-chat gpt3-finnish",
    (_BLOOM, r"\p{N}"): "viking",
    _DEEPSEEK: "deepseek-llm",
    _DEEPSEEK_CODER: "deepseek-coder",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    _SPARK: "spark2_5",
    _CHAMELEON: "chameleon",
}
SPLITS: Mapping[str, tuple[str, ...]] = {
    name: expressions for expressions, names in _NAMED.items() for name in names.split()
}
"""Expressions by the names of ways to split."""
UNNAMED, UNKNOWN = "default", "gpt-2"
"""The ways of files that name none, and of those that name one which is not known here."""


def expressions_of(split: str | None) -> tuple[str, ...]:
    """Returns the expressions of a way to split, by its name in a file."""
    return SPLITS.get(split or UNNAMED, SPLITS[UNKNOWN])
