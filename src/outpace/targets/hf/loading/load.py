"""Models and tokenizers by path, hub name, or already loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outpace.core.progress import Progress, silent
from outpace.core.values import shown
from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.cpu.kernels import EXPLICIT_KERNELS, LEFT_OPEN, Kernels
from outpace.targets.cpu.kernels import check as check_kernels
from outpace.targets.cpu.weights.blocks import block_bytes
from outpace.targets.cpu.weights.quantize import Quantization, pays
from outpace.targets.cpu.weights.quantize import check as check_quantization
from outpace.targets.hf import support, trials
from outpace.targets.hf.device_map import OUT
from outpace.targets.hf.generating import generation
from outpace.targets.hf.gguf.file import read_model
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.gguf.load import load_gguf
from outpace.targets.hf.gguf.vocabulary import end_tokens
from outpace.targets.hf.kinds import reads_sources
from outpace.targets.hf.loading.device_map import (
    DeviceMap,
    check_config,
    check_options,
    read_laid_out,
)
from outpace.targets.hf.loading.loaded import LoadedModel, check_tokenizer, max_length_of
from outpace.targets.hf.loading.lora import Adapter, check_fits, merge, read_adapter
from outpace.targets.hf.loading.placing import (
    named_device,
    pick_device,
    pick_dtype,
    pick_places,
)
from outpace.targets.hf.loading.prepare import prepare, set_up
from outpace.targets.hf.loading.quantized import check_readable, dequantized
from outpace.targets.hf.loading.reading import (
    read_config,
    read_tokenizer_of,
    read_weights,
    without_loading_bars,
    without_weights,
)
from outpace.targets.hf.loading.source import check_path, locate, names_gguf
from outpace.targets.hf.plain import quantizes_inputs
from outpace.targets.hf.vision.processor import check_processor, read_processor


def load(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    cpu_kernels: Kernels = "auto",
    quantization: Quantization | Literal["auto"] | None = None,
    lora: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    compiled: bool = False,
    check_length: Callable[[int], None] | None = None,
) -> LoadedModel:
    """Returns the model, checked: it is a causal LM whose drafts can be scored and rolled back.

    dtype "auto": float32 on a CPU, where narrow dtypes are slower, and the checkpoint's own on a
    GPU. device "auto": CUDA where there is one. device_map: where the parts of the model lie, if
    not all of them on one device (`loading.device_map`). cpu_kernels: how the linear
    layers of a model loaded here are replaced by faster ones (`kernels.speed_up`); with "auto",
    "tune" and "native" whole decoder layers are computed by our own code too. A model object that
    is handed over keeps its layers, and is put into evaluation mode. processor: of a vision-
    language model, instead of the one that comes with it. quantization: see `quantize`; "auto" is
    for drafters, which may be rounded: 8 bits where that saves time. lora: a folder with an
    adapter, which is merged into the weights before anything else is done with them. progress:
    called before each step, in the place of transformers' bars. compiled: whether passes will be
    compiled, which those of weights in blocks are not. check_length: is called with the tokens that
    the model has positions for, before its weights are read if that is known by then, and may
    raise. Raises ``ConfigError``, ``ModelLoadError`` or ``UnsupportedModel``.
    """
    check_kernels(cpu_kernels)
    check_trust(trust_remote_code)
    check_tokenizer(tokenizer)
    check_processor(processor)
    if isinstance(model, LoadedModel):
        _check_given_once(model, tokenizer=tokenizer, processor=processor)
    tokenizer = processor.tokenizer if tokenizer is None and processor is not None else tokenizer
    wanted = None if quantization == "auto" else quantization
    if wanted is not None and cpu_kernels in EXPLICIT_KERNELS:
        raise ConfigError(
            f"cpu_kernels {cpu_kernels!r} and quantization exclude each other: leave one out."
        )
    if device_map is not None:
        own = {"device": device, "quantization": quantization, "lora": lora}
        _check_laid_out(model, **own, cpu_kernels=cpu_kernels, compiled=compiled)
        cpu_kernels = "off"
    report = progress or silent
    if isinstance(model, (LoadedModel, nn.Module)):
        handed = _handed_over(model, tokenizer, processor)
        _check_handed_over(handed, dtype, device, cpu_kernels, wanted, lora)
        return _tried(handed, report)
    where, parts = pick_device(device), None
    if device_map is not None:
        where, parts = pick_places(device_map)
    kind = pick_dtype(dtype, where)
    check_quantization(wanted, where, kind)
    adapter = None if lora is None else read_adapter(Path(lora))
    looked = _Looked(report, check_length, adapter, parts, wanted, cpu_kernels)
    with nullcontext() if progress is None else without_loading_bars():  # it is shown by others
        loaded = _from_path(str(model), tokenizer, kind, where, trust_remote_code, looked)
    rounds = quantization == "auto" and cpu_kernels in LEFT_OPEN and not loaded.packed
    if rounds and pays(loaded.model):
        wanted = "int8"
    given = loaded.processor if processor is None else processor
    loaded = replace(loaded, quantization=wanted, cpu_kernels=cpu_kernels, processor=given)
    prepare(loaded, report, compiled=compiled)
    return loaded


def _check_laid_out(model: object, **options: Any) -> None:
    """Raises ``ConfigError`` for what does not go with a device map."""
    if isinstance(model, (LoadedModel, nn.Module)):
        raise ConfigError(
            "a model that you loaded lies where you have put it: give device_map to "
            "from_pretrained, and not to LLM."
        )
    check_options(**options)


def _handed_over(model: LoadedModel | nn.Module, tokenizer: Any, processor: Any) -> LoadedModel:
    """Returns a model object that its owner has loaded, with what was given besides."""
    if isinstance(model, LoadedModel):
        return _with_missing(model, tokenizer=tokenizer, processor=processor)
    return LoadedModel(model.eval(), tokenizer, type(model).__name__, processor=processor)


def _tried(handed: LoadedModel, report: Progress) -> LoadedModel:
    """Returns a model that was handed over, once it was tried, unless `load` made it."""
    if handed.cpu_kernels is None:
        report("checking the model", 0.5)
        support.check(handed.model)
        trials.probe(handed.model, coarse=quantizes_inputs(handed.model))
    return handed


def load_plain(
    model: str,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool,
    lora: str | os.PathLike[str] | None = None,
    progress: Progress,
) -> LoadedModel:
    """Returns a model as its files hold it, on the CPU, in the numbers that it would have on the
    device: for whoever puts its weights there bit by bit. None of its layers is replaced.

    It is checked by what it says of itself, and not tried out, which would take it whole. Raises as
    `load` does.
    """
    check_trust(trust_remote_code)
    kind, cpu = pick_dtype(dtype, pick_device(device)), torch.device("cpu")
    looked = _Looked(progress, adapter=None if lora is None else read_adapter(Path(lora)))
    loaded = _from_path(model, None, kind, cpu, trust_remote_code, looked)
    set_up(loaded.model)
    return replace(loaded, cpu_kernels="off")


def _with_missing(loaded: LoadedModel, **given: Any) -> LoadedModel:
    """Returns a model that the caller has loaded, with what it was loaded without."""
    missing = {
        name: value
        for name, value in given.items()
        if value is not None and getattr(loaded, name) is None
    }
    return replace(loaded, **missing) if missing else loaded


def _check_given_once(loaded: LoadedModel, **given: Any) -> None:
    """Raises ``ConfigError`` for another tokenizer or processor than a loaded model has."""
    for name, value in given.items():
        own = getattr(loaded, name)
        if value is not None and own is not None and value is not own:
            raise ConfigError(
                f"{loaded.name} was loaded with a {name}, and another one was given: leave {name} "
                "out."
            )


def check_trust(trust: object) -> None:
    if not isinstance(trust, bool):
        raise ConfigError(
            f"trust_remote_code must be True or False, not {shown(trust)}: with True, code that "
            "comes with the model is executed."
        )


def _check_handed_over(
    loaded: LoadedModel,
    dtype: str | torch.dtype,
    device: str | torch.device,
    cpu_kernels: Kernels,
    quantization: Quantization | None,
    lora: str | os.PathLike[str] | None,
) -> None:
    """Raises ``ConfigError`` for what would change a model that the caller has loaded."""
    changes = f"cpu_kernels {cpu_kernels!r}" if cpu_kernels in EXPLICIT_KERNELS else None
    changes = "quantization" if quantization is not None else changes
    changes = "lora" if lora is not None else changes
    if changes is not None:
        raise ConfigError(
            f"{changes} changes a model's layers, and a model that you loaded stays as it is: give "
            "its path or hub name instead."
        )
    if device != "auto" and not _is_on(loaded.device, named_device(device)):
        raise ConfigError(
            f"device {str(device)!r} was asked for, and the model that you loaded is on "
            f"{str(loaded.device)!r}, where it stays: move it there yourself, or leave device out."
        )
    if dtype != "auto" and pick_dtype(dtype, loaded.device) != loaded.dtype:
        raise ConfigError(
            f"dtype {str(dtype)!r} was asked for, and the model that you loaded has weights in "
            f"{str(loaded.dtype)!r}, which stay so: convert it yourself, or leave dtype out."
        )


def _is_on(actual: torch.device, wanted: torch.device) -> bool:
    return actual.type == wanted.type and wanted.index in (None, actual.index)


def load_drafter(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    target: LoadedModel,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    cpu_kernels: Kernels = "auto",
    quantization: Quantization | Literal["auto"] | None = "auto",
    lora: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    compiled: bool = False,
) -> LoadedModel:
    """Returns the model that drafts for a target, as `load` does.

    dtype and device are the target's, unless they are given; a GGUF file has a dtype of its own.
    quantization "auto": in 8 bits where that saves time. Drafted tokens are guesses, and the text
    is the target's whatever is guessed.
    """
    if quantization == "auto" and dtype is not None:
        quantization = None
    handed_over = isinstance(model, (LoadedModel, nn.Module))
    if dtype is None:
        dtype = "auto" if handed_over or _is_gguf_name(model) else target.dtype
    if device is None:
        device = "auto" if handed_over else target.device
    return load(
        model,
        tokenizer=tokenizer,
        processor=processor,
        dtype=dtype,
        device=device,
        cpu_kernels="auto" if handed_over else cpu_kernels,
        quantization=quantization,
        lora=lora,
        trust_remote_code=trust_remote_code,
        progress=progress,
        compiled=compiled,
    )


def _is_gguf_name(model: object) -> bool:
    return isinstance(model, (str, os.PathLike)) and names_gguf(model)


@dataclass(frozen=True)
class _Looked:
    """What is done on the way to the weights, and with them."""

    report: Progress
    check_length: Callable[[int], None] | None = None
    adapter: Adapter | None = None
    """What is merged into the weights."""
    device_map: DeviceMap | None = None
    """Where the parts of the model lie; None: all of them on one device."""
    quantization: Quantization | None = None
    cpu_kernels: Kernels = "auto"

    def check(self, config: Any) -> None:
        """Raises what the configuration shows to be wrong."""
        support.check_config(config)
        if self.device_map is not None:
            check_config(config)
        # How long the texts of an encoder-decoder may be, its tables of positions say.
        if self.check_length is not None and not reads_sources(config):
            self.check_length(max_length_of(config.get_text_config()))

    def check_blocks(self, name: str) -> None:
        """Raises ``ConfigError`` for what needs plain weights, where some will stay in blocks."""
        if self.quantization is not None:
            raise ConfigError(
                f"the weights in {name} are quantised already: leave quantization out, or name the "
                "model's Hugging Face folder."
            )
        if self.cpu_kernels in ("packed", "blocked"):
            raise ConfigError(
                f"cpu_kernels {self.cpu_kernels!r} computes with plain weights, and those of "
                f"{name} are in blocks: leave it at 'auto'."
            )


def _from_path(
    path: str,
    tokenizer: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    trust: bool,
    looked: _Looked,
) -> LoadedModel:
    check_path(path)
    report = looked.report
    report("looking for the model", 0.0)
    source = locate(path)
    if is_gguf(Path(source)) and looked.device_map is not None:
        raise UnsupportedModel(
            f"{path!r} is a GGUF file, whose blocks of weights stay together: name the model's "
            f"Hugging Face folder, or {OUT}."
        )
    if is_gguf(Path(source)):
        return _from_gguf(source, path, tokenizer, dtype, device, looked)
    generation.check_file(source)
    config = read_config(source, path, trust)
    looked.check(config)
    method = check_readable(config, path, device)
    adapter = looked.adapter
    # Before the weights, which are what takes long.
    if adapter is not None:
        check_fits(adapter, without_weights(config, path, trust))
    known = read_tokenizer_of(source, path, trust) if tokenizer is None else tokenizer
    report("reading the weights", 0.05)
    processor = read_processor(source, path, config, trust)
    if looked.device_map is not None:
        read = partial(read_weights, source, path, config, dtype, trust)
        laid_out = read_laid_out(read, looked.device_map)
        return LoadedModel(laid_out.eval(), known, path, processor=processor)
    model = dequantized(read_weights(source, path, config, dtype, trust), method, path, dtype)
    if adapter is not None:
        report("merging the adapter", 0.3)
        merge(adapter, model)
    lora = None if adapter is None else adapter.path
    return LoadedModel(model.to(device).eval(), known, path, processor=processor, lora=lora)


def _from_gguf(
    source: str,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    looked: _Looked,
) -> LoadedModel:
    adapter, report = looked.adapter, looked.report
    report("reading the header", 0.02)
    file = read_model(Path(source))
    if file.packed and device.type == "cpu":
        looked.check_blocks(name)
    model, known = load_gguf(file, tokenizer, dtype, device, report, looked.check, adapter)
    return LoadedModel(
        model,
        known,
        name,
        packed=bool(block_bytes(model)),
        ends=end_tokens(file),
        lora=None if adapter is None else adapter.path,
        num_mtp_modules=len(file.nextn),
    )
