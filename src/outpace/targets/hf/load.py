"""Models and tokenizers by path, hub name, or already loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from outpace.core.values import shown
from outpace.errors import ConfigError, ModelLoadError, VocabularyMismatch
from outpace.targets.cpu.blocks import BlockLinear, block_bytes, embedding_dtype
from outpace.targets.cpu.kernels import ASKED, NATIVE, Kernels, speed_up
from outpace.targets.cpu.kernels import check as check_kernels
from outpace.targets.cpu.native_blocks import use_block_kernels, widen_blocks
from outpace.targets.cpu.native_layer import leave_native_layers, use_native_layers
from outpace.targets.cpu.native_linear import lay_out_weights, share_products
from outpace.targets.cpu.native_model import use_native_model
from outpace.targets.cpu.quantize import (
    Quantization,
    check_quantized,
    pays,
    quantize,
    rounds_activations,
)
from outpace.targets.cpu.quantize import check as check_quantization
from outpace.targets.hf import generation, support
from outpace.targets.hf.attention import use_grouped
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.gguf.load import load_gguf, read_gguf_tokenizer
from outpace.targets.hf.source import check_path, has_tokenizer, is_pickled, locate, names_gguf
from outpace.targets.hf.weights import weight_bytes

LOGGER = logging.getLogger("outpace")

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Progress = Callable[[str, float], None]
"""Is called with what is being done, and how much of the whole is behind it, from 0 to 1."""

AGAIN = "download or save the model again."


@dataclass(frozen=True)
class Loaded:
    """A causal LM that outpace can decode, its tokenizer if it has one, and what both say."""

    model: nn.Module
    tokenizer: Any
    name: str
    same_tokens: bool = False
    """Known to share the tokens of whatever it is used with."""
    quantization: Quantization | None = None
    """How its linear layers were quantised when it was loaded."""
    packed: bool = False
    """Whether its weights are in blocks, as a GGUF file holds them."""
    cpu_kernels: Kernels | None = None
    """How its linear layers were to be replaced when it was loaded; None: it was handed over."""
    processor: Any = None
    """What makes a vision-language model's inputs of texts and images, if it has one."""

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        config: Any = self.model.config
        return config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.model.parameters()).dtype

    @property
    def max_length(self) -> int:
        """Tokens that the model has positions for.

        Where longer texts have other rotary angles (LongRoPE), only those of the shorter ones: a
        batch would change what its rows have cached as soon as the longest of them got there.
        Where attention drops tokens from some length on (Doge), only texts up to that length.
        """
        top = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        top = min(top, int(getattr(self.config, "keep_window_size", None) or top))
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
        first = [kind.get("original_max_position_embeddings") for kind in kinds]
        long = any(kind.get("rope_type") == "longrope" for kind in kinds)
        return min([top, *filter(None, first)]) if long else top

    @cached_property  # tokenizers make the whole table anew each time: 10 ms
    def vocabulary(self) -> int:
        """Tokens that can be generated: heads are often padded beyond what the tokenizer knows."""
        size = int(self.config.vocab_size)
        if self.tokenizer is None:
            return size
        return min(size, int(max(self.tokenizer.get_vocab().values())) + 1)

    @property
    def defaults(self) -> dict[str, Any]:
        """The model's generation_config as a dict of the options that it sets."""
        config: Any = self.model.generation_config
        return dict(config.to_diff_dict())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        config: Any = self.model.generation_config
        ids = config.eos_token_id
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return weight_bytes(self.model)


def load(
    model: str | os.PathLike[str] | nn.Module | Loaded,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    cpu_kernels: Kernels = "auto",
    quantization: Quantization | Literal["auto"] | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Returns the model, checked: it is a causal LM whose drafts can be scored and rolled back.

    dtype "auto": float32 on a CPU, where narrow dtypes are slower, and the checkpoint's own on a
    GPU. device "auto": CUDA where there is one. cpu_kernels: how the linear layers of a model
    loaded here are replaced by faster ones (`kernels.speed_up`); with "auto", "tune" and "native"
    whole layers of the Llama kind are computed by our own code too. A model object that is handed
    over stays as it is. quantization: see `quantize`; "auto" is for drafters, which may be rounded:
    8 bits where that saves time. progress: called before each step. Raises ``ConfigError``,
    ``ModelLoadError`` or ``UnsupportedModel``.
    """
    check_kernels(cpu_kernels)
    _check_trust(trust_remote_code)
    wanted = None if quantization == "auto" else quantization
    if wanted is not None and cpu_kernels in ASKED:
        raise ConfigError(
            f"cpu_kernels {cpu_kernels!r} and quantization exclude each other: leave one out."
        )
    report = progress or _silent
    if isinstance(model, (Loaded, nn.Module)):
        _check_handed_over(cpu_kernels, wanted)
        if isinstance(model, nn.Module):
            model = Loaded(model.eval(), tokenizer, type(model).__name__)
        report("checking the model", 0.5)
        support.check(model.model)
        support.probe(model.model)
        return model
    loaded = _from_path(str(model), tokenizer, dtype, device, trust_remote_code, wanted, report)
    rounds = quantization == "auto" and cpu_kernels in ("auto", "tune") and not loaded.packed
    if rounds and pays(loaded.model):
        wanted = "int8"
    if loaded.packed and cpu_kernels in ("packed", "blocked"):
        raise ConfigError(
            f"cpu_kernels {cpu_kernels!r} computes with plain weights, and those of {loaded.name} "
            "are in blocks: leave it at 'auto'."
        )
    loaded = replace(loaded, quantization=wanted, cpu_kernels=cpu_kernels)
    _prepare(loaded, report)
    return loaded


def _prepare(loaded: Loaded, report: Progress) -> None:
    """Replaces the layers of a model that was just loaded, and checks what it computes then."""
    model, kernels = loaded.model, loaded.cpu_kernels or "off"
    use_grouped(model)
    support.check(model)
    report("arranging the weights for this processor", 0.4)
    quantization = loaded.quantization
    rounded = quantization is not None and rounds_activations(model, quantization)
    if rounded:
        # Checked exactly before, because rounding cannot be told from an ignored mask afterwards.
        support.probe(model)
    in_blocks = _replace_layers(loaded, kernels)
    if in_blocks and not _in_native_code(model):
        _widen(loaded, kernels)
        in_blocks = False
    report("checking that drafts are scored as plain text is", 0.7)
    if any(isinstance(module, BlockLinear) for module in model.modules()):
        support.check_numbers(model)  # Each pass takes seconds; the rest was tried on a likeness.
    else:
        support.probe(model, coarse=rounded or in_blocks)
    if kernels in NATIVE and not in_blocks:
        report("trying whole layers in native code", 0.85)
        _in_native_code(model)
    check_quantized(model, quantization)
    report("ready", 1.0)


def _replace_layers(loaded: Loaded, kernels: Kernels) -> bool:
    """Puts faster or quantised layers in the place of plain ones; returns whether layers whose
    weights are in blocks round their inputs then."""
    in_blocks = 0
    if loaded.quantization is not None:
        quantize(loaded.model, loaded.quantization)
    else:
        speed_up(loaded.model, kernels)
        model: Any = loaded.model
        narrow = embedding_dtype(model.get_input_embeddings()) == torch.float32
        in_blocks = use_block_kernels(model) if kernels in NATIVE and narrow else 0
    if kernels in NATIVE:
        lay_out_weights(loaded.model, tune=kernels == "tune")
    return in_blocks > 0


def _in_native_code(model: nn.Module) -> bool:
    """Lets our own code compute what it can of a model; returns whether that is the whole of it."""
    share_products(model)
    use_native_layers(model)
    return use_native_model(model)


def _widen(loaded: Loaded, kernels: Kernels) -> None:
    """Puts float32 weights in the place of those in blocks.

    Products of blocks round their inputs. Where attention is not our own it adds up in another
    order when several tokens share a pass, which now and then decides how an input is rounded:
    speculation would change the text.
    """
    leave_native_layers(loaded.model)
    LOGGER.warning(
        "outpace: the weights of %s are widened from blocks to float32 (%.2f GB), because models "
        "of this kind are not wholly computed by outpace's own code.",
        loaded.name,
        widen_blocks(loaded.model) / 1e9,
    )
    speed_up(loaded.model, kernels)
    lay_out_weights(loaded.model, tune=kernels == "tune")


def _silent(_: str, __: float) -> None:
    """Reports nothing."""


def _check_trust(trust: object) -> None:
    if not isinstance(trust, bool):
        raise ConfigError(
            f"trust_remote_code must be True or False, not {shown(trust)}: with True, code that "
            "comes with the model is executed."
        )


def _check_handed_over(cpu_kernels: Kernels, quantization: Quantization | None) -> None:
    """Raises for what would change a model that the caller has loaded."""
    changes = f"cpu_kernels {cpu_kernels!r}" if cpu_kernels in ASKED else None
    changes = "quantization" if quantization is not None else changes
    if changes is not None:
        raise ConfigError(
            f"{changes} changes a model's layers, and a model that you loaded stays as it is: give "
            "its path or hub name instead."
        )


def load_drafter(
    model: str | os.PathLike[str] | nn.Module | Loaded,
    target: Loaded,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    cpu_kernels: Kernels = "auto",
    quantization: Quantization | Literal["auto"] | None = "auto",
    trust_remote_code: bool = False,
) -> Loaded:
    """Returns the model that drafts for a target, as `load` does.

    dtype and device are the target's, unless they are given; a GGUF file has a dtype of its own.
    quantization "auto": in 8 bits where that saves time. Drafted tokens are guesses, and the text
    is the target's whatever is guessed.
    """
    if quantization == "auto" and dtype is not None:
        quantization = None
    if dtype is None:
        dtype = "auto" if _is_gguf_name(model) else target.dtype
    return load(
        model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=target.device if device is None else device,
        cpu_kernels="auto" if isinstance(model, (Loaded, nn.Module)) else cpu_kernels,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
    )


def _is_gguf_name(model: object) -> bool:
    return isinstance(model, (str, os.PathLike)) and names_gguf(model)


def _from_path(
    path: str,
    tokenizer: Any,
    dtype: str | torch.dtype,
    device: str | torch.device,
    trust: bool,
    quantization: Quantization | None,
    report: Progress,
) -> Loaded:
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    check_quantization(quantization, where, kind)
    check_path(path)
    report("looking for the model", 0.0)
    source = locate(path)
    if is_gguf(Path(source)):
        return _from_gguf(source, path, tokenizer, kind, where, quantization, report)
    generation.check_file(source)
    config = _config(source, path, trust)
    support.check_config(config)
    # Before the weights, which are what takes long.
    known = _tokenizer(source, path, trust) if tokenizer is None else tokenizer
    report("reading the weights", 0.05)
    model = _weights(source, path, config, kind, trust)
    return Loaded(model.to(where).eval(), known, path)


def _from_gguf(
    source: str,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    quantization: Quantization | None,
    report: Progress,
) -> Loaded:
    model, known = load_gguf(source, tokenizer, dtype, device, _attention, report)
    packed = bool(block_bytes(model))
    if packed and quantization is not None:
        raise ConfigError(
            f"the weights in {name} are quantised already: leave quantization out, or name the "
            "model's Hugging Face folder."
        )
    return Loaded(model, known, name, packed=packed)


# What follows reads from ``source``, a folder or hub name, and calls the model ``name`` in errors.


def _config(source: str, name: str, trust: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust)
    except Exception as error:  # transformers raises all sorts over the files of others
        if _asks_for_trust(error):
            raise _untrusted(name) from error
        if isinstance(error, OSError) and not Path(source).exists():
            raise ModelLoadError(
                f"{name!r} is neither a folder here nor a model that can be downloaded: "
                f"{_first_line(error)}"
            ) from error
        raise ModelLoadError(
            f"cannot read the config.json of {name!r} ({_reason(error)}): {AGAIN}"
        ) from error


def _weights(
    source: str, name: str, config: Any, dtype: str | torch.dtype, trust: bool
) -> nn.Module:
    load_it: Any = AutoModelForCausalLM.from_pretrained  # its stubs know one result, not the pair
    try:
        model, report = load_it(
            source,
            config=config,
            dtype=dtype,
            trust_remote_code=trust,
            attn_implementation=_attention(config),
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ModelLoadError(
            f"the weights in {name!r} are damaged or cut short ({_first_line(error)}): download or "
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
            f"cannot load a causal language model from {name!r}: {_why(error, config)}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would fill them with random numbers, and the text would be noise.
        raise ModelLoadError(
            f"the weights in {name!r} lack {len(missing)} of those that its config.json calls for "
            f"({missing[0]!r} is one): download or save the model again."
        )
    return model  # type: ignore[no-any-return]


def _asks_for_trust(error: Exception) -> bool:
    return isinstance(error, ValueError) and "trust_remote_code=True" in str(error)


def _untrusted(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name!r} comes with Python code of its own, which loading it would execute: read that "
        "code, and if you trust it pass trust_remote_code=True (for a drafter, in "
        "speculative_config)."
    )


def _why(error: Exception, config: Any) -> str:
    text = str(error)
    if text.startswith("Unrecognized configuration class"):
        return f"its type {config.model_type!r} is no causal language model."
    if "ignore_mismatched_sizes" in text:
        return "the shapes of its weights are not those that its config.json calls for."
    return f"{_reason(error).rstrip('.')}: {AGAIN}"


def _attention(config: Any) -> str | None:
    # Soft-capped attention scores exist in the eager kernel only; elsewhere transformers picks the
    # fastest of those that the model supports.
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def read_tokenizer(model: str, trust_remote_code: bool) -> Any:
    """Returns the tokenizer of a folder or hub name, or None if there is none.

    Raises ``ModelLoadError`` for one that cannot be read.
    """
    source = locate(model)
    if is_gguf(Path(source)):
        return read_gguf_tokenizer(source)
    return _tokenizer(source, model, trust_remote_code)


def _tokenizer(source: str, name: str, trust: bool) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
        tokenizer("text")  # some mistakes in its files only show when it is used
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare exceptions over a broken file
        if _asks_for_trust(error):
            raise _untrusted(name) from error
        if has_tokenizer(source):
            raise ModelLoadError(
                f"cannot read the tokenizer of {name!r} ({_reason(error)}): {AGAIN}"
            ) from error
        return None  # prompts must then be token ids, and the engine says so


def hide_progress_bars(*, downloads: bool) -> None:
    """Silences transformers' loading bars, for programs that show their own progress.

    downloads: those of the hub too. Changes the whole process.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # hides both kinds
    if not downloads:
        enable_progress_bars()


def pick_device(device: str | torch.device) -> torch.device:
    """Returns the device; ``ConfigError`` if it does not exist here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"unknown device {shown(device)}: use 'auto', 'cpu' or 'cuda'."
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device: use 'cpu'.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r} was asked for, but torch sees {torch.cuda.device_count()} "
            "CUDA device(s), counted from 0."
        )
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """Returns the dtype to load weights in ("auto" is left to the checkpoint on a GPU)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {shown(dtype)}: choose from auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def check_same_vocabulary(target: Loaded, drafter: Loaded) -> None:
    """Raises ``VocabularyMismatch`` unless every token id means the same text in both models."""
    if drafter.same_tokens:
        return
    if target.tokenizer is None or drafter.tokenizer is None:
        ours, theirs = target.config.vocab_size, drafter.config.vocab_size
        if ours != theirs:
            raise VocabularyMismatch(
                f"the target has {ours} tokens and the drafter {theirs}, and without both "
                "tokenizers nothing tells that they agree: use a drafter with the target's "
                "vocabulary."
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    different = [token for token in theirs if ours.get(token, theirs[token]) != theirs[token]]
    unknown = [token for token in theirs if token not in ours]
    if different or len(unknown) > max(64, len(ours) // 100):
        example = (different or unknown)[0]
        raise VocabularyMismatch(
            f"drafter and target have different tokenizers: the target's has {len(ours)} tokens, "
            f"the drafter's {len(theirs)}, and {example!r} is {ours.get(example, 'absent')} in the "
            f"first and {theirs[example]} in the second; use a drafter trained with the target's "
            "tokenizer."
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def _reason(error: BaseException) -> str:
    # The text of errors such as KeyError says nothing without their name.
    speaks = isinstance(error, (OSError, ImportError)) or type(error) in (ValueError, RuntimeError)
    return _first_line(error) if speaks else f"{type(error).__name__}: {_first_line(error)}"
