"""Reads configuration, weights and tokenizer of a folder or hub name.

Whatever is wrong with the files of others becomes a sentence that names the cause and the remedy.
Each function reads from ``source`` and calls the model ``name`` in errors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from outpace.core.values import shown
from outpace.errors import ModelLoadError, UnsupportedModel, reason_of
from outpace.targets.hf.attention import attention_for
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.gguf.load import read_gguf_tokenizer
from outpace.targets.hf.kinds import INSTALLED, reads_sources, rope_entries, sees_images
from outpace.targets.hf.loading.quantized import check_whole
from outpace.targets.hf.loading.source import has_tokenizer, is_pickled, locate

AGAIN = "download or save the model again."
UNKNOWN_TYPE = re.compile(r"has model type `([^`]*)` but Transformers does not recognize")
"""What transformers says of a model that is newer than itself."""


def read_config(source: str, name: str, trust: bool) -> Any:
    """Returns the configuration. trust: whether code that comes with it may be executed."""
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust)
    except Exception as error:  # transformers raises all sorts over the files of others
        if _asks_for_trust(error):
            raise _untrusted(name) from error
        if isinstance(error, OSError) and not Path(source).exists():
            raise ModelLoadError(
                f"{name!r} is neither a folder here nor a model that can be downloaded: "
                f"{reason_of(error)}"
            ) from error
        unknown = UNKNOWN_TYPE.search(str(error))
        if unknown is not None:
            raise ModelLoadError(
                f"{name!r} is a model of type {shown(unknown[1])}, which transformers {INSTALLED} "
                "does not know: install a later one."
            ) from error
        raise ModelLoadError(
            f"cannot read the config.json of {name!r} ({_reason(error)}): {AGAIN}"
        ) from error


def read_weights(
    source: str,
    name: str,
    config: Any,
    dtype: str | torch.dtype,
    trust: bool,
    **placing: Any,
) -> nn.Module:
    """Returns the model, with all the weights that its configuration calls for. placing: arguments
    of transformers that say where they lie."""
    try:
        model, report = class_for(config).from_pretrained(
            source,
            config=config,
            dtype=dtype,
            trust_remote_code=trust,
            attn_implementation=attention_for(config),
            output_loading_info=True,
            **placing,
        )
    except SafetensorError as error:
        raise ModelLoadError(
            f"the weights in {name!r} are damaged or cut short ({reason_of(error)}): download or "
            "save the model again."
        ) from error
    except Exception as error:  # as above
        if _asks_for_trust(error):
            raise _untrusted(name) from error
        if is_pickled(source) and "weights_only" in str(error):
            raise ModelLoadError(
                f"the weights in {name!r} are pickled and hold more than tensors, which could "
                "run any code: use a copy of the model that is saved as *.safetensors."
            ) from error
        raise ModelLoadError(
            f"cannot load a causal language model from {name!r}: {why(error, config)}"
        ) from error
    check_whole(report["unexpected_keys"], name)
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would fill them with random numbers, and the text would be noise.
        raise ModelLoadError(
            f"the weights in {name!r} lack {len(missing)} of those that its config.json calls for "
            f"({missing[0]!r} is one): download or save the model again."
        )
    return model  # type: ignore[no-any-return]


def without_weights(config: Any, name: str, trust: bool) -> nn.Module:
    """Returns the model of a configuration, whose weights have no storage."""
    with torch.device("meta"), no_init_weights():
        try:
            built: nn.Module = class_for(config).from_config(
                copy.deepcopy(config), trust_remote_code=trust
            )
        except Exception as error:  # models raise all sorts over values that make no sense
            raise UnsupportedModel(
                f"no model can be made as the files of {name!r} describe it: {why(error, config)}"
            ) from error
    return built


def class_for(config: Any) -> Any:
    """The class that reads the weights; untyped, because the stubs of ``from_pretrained`` know of a
    model alone, and not of the report that is asked for with it."""
    if not reads_sources(config):
        return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM
    # Where speech is heard the first one has no class for the configuration.
    hears = type(config) in AutoModelForSpeechSeq2Seq._model_mapping
    return AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM


def _asks_for_trust(error: Exception) -> bool:
    return isinstance(error, ValueError) and "trust_remote_code=True" in str(error)


def _untrusted(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name!r} comes with Python code of its own, which loading it would execute: read that "
        "code, and if you trust it pass trust_remote_code=True (for a drafter, in "
        "speculative_config)."
    )


def why(error: Exception, config: Any) -> str:
    """Returns why no model could be made, and what to do about it, as the end of a sentence."""
    text = str(error)
    if text.startswith("Unrecognized configuration class"):
        return f"its type {config.model_type!r} is no causal language model."
    for unknown in error.args if isinstance(error, KeyError) else ():
        known = rope_entries(config.get_text_config())
        if unknown in [entry.get("rope_type") for entry in known]:
            return (
                f"its positions are rotated in a way (rope_type {shown(unknown)}) that "
                f"transformers {INSTALLED} does not know: install a later one."
            )
    if "ignore_mismatched_sizes" in text:
        return "the shapes of its weights are not those that its config.json calls for."
    return f"{_reason(error).rstrip('.')}: {AGAIN}"


def read_tokenizer(model: str, trust_remote_code: bool) -> Any:
    """Returns the tokenizer of a folder or hub name, or None if there is none.

    Raises ``ModelLoadError`` for one that cannot be read.
    """
    source = locate(model)
    if is_gguf(Path(source)):
        return read_gguf_tokenizer(source)
    return read_tokenizer_of(source, model, trust_remote_code)


def read_tokenizer_of(source: str, name: str, trust: bool) -> Any:
    """Returns the tokenizer of a folder, None if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
        tokenizer("text")  # some mistakes in its files only show when it is used
        # For some types, such as Whisper, one without tokens is made where there are no files.
        return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None
    except Exception as error:  # the tokenizers library raises bare exceptions over a broken file
        if _asks_for_trust(error):
            raise _untrusted(name) from error
        if has_tokenizer(source):
            raise ModelLoadError(
                f"cannot read the tokenizer of {name!r} ({_reason(error)}): {AGAIN}"
            ) from error
        return None  # prompts must then be token ids, and the engine says so


def _reason(error: BaseException) -> str:
    # The text of errors such as KeyError says nothing without their name.
    speaks = isinstance(error, (OSError, ImportError)) or type(error) in (ValueError, RuntimeError)
    return reason_of(error, named=not speaks)


# -- loading bars of transformers and of its hub ---------------------------------------------------


def hide_progress_bars(*, downloads: bool) -> None:
    """Silences transformers' loading bars, for programs that show their own progress.

    downloads: those of the hub too. Changes the whole process.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # both kinds
    if not downloads:
        enable_progress_bars()


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """Hides transformers' loading bars for a while, and leaves those of downloads as they are."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    hub = not are_progress_bars_disabled()
    hide_progress_bars(downloads=not hub)
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if not hub:
            disable_progress_bars()
