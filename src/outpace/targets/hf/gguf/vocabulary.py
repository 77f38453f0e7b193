"""The tokenizer of a GGUF file, and the tokens that end a text."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerFast

from outpace.core.values import shown
from outpace.errors import ModelLoadError
from outpace.targets.hf.gguf.file import GGUFModel, is_number, printable_reason
from outpace.targets.hf.gguf.pretokenizers import OF_LLAMA3, SPLITS
from outpace.targets.hf.gguf.tokenizers import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    byte_level,
    sentencepiece,
)

LOGGER = logging.getLogger("outpace")

ENDS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
        "<end_of_turn>", "<|return|>", "<|call|>", "<EOT>", "_<EOT>", "<|endofturn|>",
        "<end_of_utterance>", "<turn|>", "<|tool_response>", "<|flush|>", "<|calls|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
"""Special tokens that end an answer, whether or not the file names them: files name one or two, and
chat models end with others too. The list is of llama.cpp's kind."""

TURN_ENDS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""What ends a turn of gpt-oss, and one of Solar Open."""
MESSAGE_END = "<|end|>"
"""What ends each message of such a turn, which may have several."""

BY_TEXT = "known by its text"
"""Who names the tokens of `ENDS` that a file does not name."""

END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
BEGUN = frozenset({*OF_LLAMA3, "tekken", "chameleon"})
"""Ways to split a text whose models read a token of beginning before each text, also where the file
does not say so: the list is llama.cpp's. The first files of Llama 3 do not say so."""

READ = ("model", "pre", "tokens", "scores", "token_type", "merges", "add_space_prefix")
"""What a tokenizer is made of."""
PER_TOKEN = ("scores", "token_type")
"""Arrays with a number for each token."""

LONGEST = 1_000
"""Characters of a token where merges are worked out, which takes time by the square of its length.
Real tokens have a few dozen at most."""

SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

OPTIONS = {
    "chat_template": "chat_template",
    "ggml.add_bos_token": "add_bos_token",
    "ggml.add_eos_token": "add_eos_token",
}
"""Options of a tokenizer, and what transformers calls them."""

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Options of sampling that a file may recommend, and what transformers calls them."""


def tokenizer_of(model: GGUFModel) -> Any:
    """Returns the tokenizer of a file, None if the file has none.

    Raises ``ModelLoadError`` for one that cannot be read.
    """
    kind = model.values.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if not isinstance(kind, str):
        raise ModelLoadError(
            f"{model.path} names no tokenizer where its name should stand: download it again, or "
            "pass tokenizer=."
        )
    if kind in ("none", "no_vocab"):
        return None
    described = _described(model)
    if kind == "gpt2":
        _check_split(model, described.get("pre"))
    options = _options(model, described["tokens"])
    try:
        backend = _backend(model, described)
        wrap: Any = PreTrainedTokenizerFast
        tokenizer = wrap(tokenizer_object=_Handed(backend), **options)
        tokenizer("text")
    except (KeyboardInterrupt, SystemExit, ModelLoadError):
        raise
    except BaseException as error:  # the tokenizers library panics with one of its own
        raise ModelLoadError(
            f"cannot read the tokenizer of {str(model.path)!r} ({printable_reason(error)}): "
            "download it again, or pass tokenizer=."
        ) from error
    return tokenizer


class _Handed:
    """A tokenizer that whoever copies it takes as it is: transformers copies what it is given, by
    way of its JSON, and nobody else would use the first one."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, _: Any) -> Any:
        return self._backend


def _backend(model: GGUFModel, described: dict[str, Any]) -> Any:
    if described["model"] != "gpt2":
        _check_lengths(model, described)
        return sentencepiece(model.architecture, described)
    return byte_level(
        described["tokens"],
        described.get("token_type") or (),
        _merges(model, described),
        described.get("pre"),
        _special(model).values(),
    )


def _check_lengths(model: GGUFModel, described: dict[str, Any]) -> None:
    longest = max(map(len, described["tokens"]))
    if "merges" not in described and longest > LONGEST:
        raise ModelLoadError(
            f"{model.path} holds no merges, which are worked out for tokens of at most {LONGEST} "
            f"characters, and a token of {longest}: download it again, or pass tokenizer=."
        )


def _merges(model: GGUFModel, described: dict[str, Any]) -> list[str]:
    merges = described.get("merges")
    if not isinstance(merges, list):
        raise ModelLoadError(
            f"{model.path} holds a byte-level tokenizer without its merges: download it again, or "
            "pass tokenizer=."
        )
    return merges


def generation_config_of(model: GGUFModel) -> GenerationConfig:
    """Returns the tokens that end a text and the sampling that the file recommends, if it does."""
    options: dict[str, Any] = {
        ours: found
        for theirs, ours in SAMPLING.items()
        if (found := _recommended(model, f"general.sampling.{theirs}")) is not None
    }
    if options.keys() - {"repetition_penalty"}:
        options["do_sample"] = options.get("temperature", 1.0) > 0
    config: Any = GenerationConfig
    made: GenerationConfig = config(
        eos_token_id=list(end_tokens(model)) or None,
        bos_token_id=token_id(model, "bos_token_id"),
        pad_token_id=token_id(model, "padding_token_id"),
        **options,
    )
    return made


def _recommended(model: GGUFModel, name: str) -> int | float | None:
    found = model.values.get(name)
    if found is not None and not (is_number(found) and math.isfinite(found)):
        raise ModelLoadError(
            f"{model.path} says that its {name} is {shown(found)}, not a number: download it again."
        )
    return found


def end_tokens(model: GGUFModel) -> dict[int, list[str]]:
    """Returns the tokens that end a text, the file's own end of text first, with the fields of the
    file that name them."""
    found: dict[int, list[str]] = {}
    for key in END_IDS:
        number = token_id(model, key)
        if number is not None:
            found.setdefault(number, []).append(f"the file's {key}")
    tokens, types = model.values.get("tokenizer.ggml.tokens"), _types(model)
    texts = tokens if isinstance(tokens, list) else []
    for number, (token, kind) in enumerate(zip(texts, types, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and token in ENDS:
            found.setdefault(number, [BY_TEXT])
    here = {texts[number] for number in found if number < len(texts)}
    if any(here >= ends for ends in TURN_ENDS):
        found = {n: found[n] for n in found if texts[n : n + 1] != [MESSAGE_END]}
    return found


def _described(model: GGUFModel) -> dict[str, Any]:
    """What a tokenizer is made of, by llama.cpp's names. No arrays are read but those that hold a
    number for each token: others, which may be of any length, are made no lists of, which would
    take ten times their memory."""
    found = {
        name: model.values[f"tokenizer.ggml.{name}"]
        for name in READ
        if f"tokenizer.ggml.{name}" in model.values
    }
    tokens = found.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(
            f"{model.path} names a tokenizer and holds no tokens: download it again, or pass "
            "tokenizer=."
        )
    table = model.tensors.get("token_embd.weight")
    if table is not None and len(tokens) > table.shape[0]:
        raise ModelLoadError(
            f"{model.path} holds {len(tokens)} tokens and weights for {table.shape[0]}: download "
            "it again."
        )
    for name in PER_TOKEN:
        numbers = found.get(name)
        if isinstance(numbers, np.ndarray):
            if len(numbers) < len(tokens):
                raise ModelLoadError(
                    f"{model.path} holds {len(tokens)} tokens and a {name} of {len(numbers)} of "
                    "them: download it again, or pass tokenizer=."
                )
            found[name] = numbers[: len(tokens)].tolist()
    return found


def _options(model: GGUFModel, tokens: list[str]) -> dict[str, Any]:
    """What the tokenizer adds to a text, its special tokens, and its chat template."""
    found: dict[str, Any] = {
        ours: model.values[f"tokenizer.{theirs}"]
        for theirs, ours in OPTIONS.items()
        if f"tokenizer.{theirs}" in model.values
    }
    template = found.get("chat_template", "")
    if not isinstance(template, str):
        raise ModelLoadError(
            f"{model.path} says that its chat template is {shown(template)}, not a text: download "
            "it again, or pass tokenizer=."
        )
    special = _special(model)
    for name in SPECIAL:
        found[name] = tokens[special[name]] if name in special else None
    if _is_begun(model):
        found.setdefault("add_bos_token", True)
    if "gemma4" in (model.values.get("tokenizer.ggml.model"), model.architecture):
        found["add_bos_token"] = True  # the first files say that there is none, as llama.cpp knows
    return found


def _special(model: GGUFModel) -> dict[str, int]:
    """The special tokens that the file names. What it calls the padding or the unknown token, and
    by its type an ordinary one, is left out: converters write 0 where they know of none, which is
    the exclamation mark of many vocabularies, and special tokens are not shown."""
    types = _types(model)
    found = {name: token_id(model, key) for name, key in SPECIAL.items()}
    ordinary = {
        name
        for name in ("pad_token", "unk_token")
        if (number := found[name]) is not None and types[number : number + 1] == [NORMAL]
    }
    return {n: number for n, number in found.items() if number is not None and n not in ordinary}


def _is_begun(model: GGUFModel) -> bool:
    """Whether a token of beginning stands before each text where the file says neither that it does
    nor that it does not."""
    if model.values["tokenizer.ggml.model"] == "llama":
        return True
    split = model.values.get("tokenizer.ggml.pre")
    known = isinstance(split, str) and split in BEGUN
    return known and token_id(model, "bos_token_id") is not None


def token_id(model: GGUFModel, key: str) -> int | None:
    """Returns the id of a special token, None if the file names none."""
    found = model.values.get(f"tokenizer.ggml.{key}")
    tokens = model.values.get("tokenizer.ggml.tokens")
    if found is None or (isinstance(found, int) and found == 0xFFFFFFFF):  # -1: none
        return None
    known = len(tokens) if isinstance(tokens, list) and tokens else 1 << 31
    if not isinstance(found, int) or not 0 <= found < known:
        raise ModelLoadError(
            f"{model.path} says that its {key} is {shown(found)}, which is no token: download "
            "it again."
        )
    return found


def _types(model: GGUFModel) -> list[int]:
    found, tokens = (model.values.get(f"tokenizer.ggml.{n}") for n in ("token_type", "tokens"))
    if not isinstance(found, np.ndarray) or not isinstance(tokens, list):
        return []
    types: list[int] = found[: len(tokens)].tolist()
    return types


def _check_split(model: GGUFModel, split: Any) -> None:
    if split is None:
        LOGGER.warning(
            "outpace: %s does not say how it splits texts; they are split as llama.cpp splits them "
            "then, and some prompts may become other tokens. A tokenizer of your own is given by "
            "tokenizer=.",
            model.path,
        )
    elif not (isinstance(split, str) and split in SPLITS):
        LOGGER.warning(
            "outpace: %s splits texts in its own way (%s), which is not known here; they are split "
            "as GPT-2 does, and some prompts may become other tokens. A tokenizer of your own is "
            "given by tokenizer=.",
            model.path,
            shown(split),
        )
