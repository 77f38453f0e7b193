"""A model as far as it is known without its weights: what loading finds before it reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outpace.errors import ModelLoadError
from outpace.targets.hf import support
from outpace.targets.hf.attention import attention_for
from outpace.targets.hf.generating import generation
from outpace.targets.hf.gguf.architecture import config_of, no_such_model
from outpace.targets.hf.gguf.building import empty_model
from outpace.targets.hf.gguf.file import GGUFModel, read_model
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.gguf.names import map_tensors
from outpace.targets.hf.gguf.vocabulary import tokenizer_of
from outpace.targets.hf.loading.files import headers, weight_files
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.nextn_names import has_mtp_weights
from outpace.targets.hf.loading.placing import pick_device
from outpace.targets.hf.loading.quantized import check_readable, method_of
from outpace.targets.hf.loading.reading import (
    read_config,
    read_tokenizer_of,
    without_weights,
)
from outpace.targets.hf.loading.source import check_path, downloaded, locate


@dataclass(frozen=True, eq=False)
class Outline:
    """What the files of a model say of it."""

    loaded: LoadedModel
    """The model, with weights that have no storage, and its tokenizer."""
    nbytes: int
    """Bytes of its weights on the disk."""
    dtypes: tuple[str, ...]
    """The types of its numbers or the kinds of its blocks."""
    quantized: str | None = None
    """How others have quantised its weights."""
    gguf: GGUFModel | None = None
    has_mtp: bool = False
    """Whether it brings a multi-token-prediction module."""


def outline_model(name: str, trust: bool = False) -> Outline:
    """Returns what the files of a model on this machine say. Raises as loading it does, as far as
    loading has read no weights yet."""
    check_path(name)
    source = _here(name)
    if is_gguf(Path(source)):
        return _outline_gguf(source, name)
    generation.check_file(source)
    config = read_config(source, name, trust)
    support.check_config(config)
    check_readable(config, name, pick_device("auto"))
    known = read_tokenizer_of(source, name, trust)
    files = weight_files(Path(source))
    names, dtypes = headers(files)
    return Outline(
        LoadedModel(without_weights(config, name, trust), known, name),
        sum(file.stat().st_size for file in files),
        dtypes,
        method_of(config),
        has_mtp=has_mtp_weights(names, config),
    )


def _here(name: str) -> str:
    """The folder or file of a model on this machine: nothing is downloaded to be looked at."""
    if Path(name).exists():
        return locate(name)
    found = downloaded(name)
    if found is None:
        raise ModelLoadError(
            f"there is neither a file nor a folder {name!r}, and no model of this name was "
            "downloaded before: download it first, since only what is here is looked at."
        )
    return str(found)


def _outline_gguf(source: str, name: str) -> Outline:
    model = read_model(Path(source))
    config = config_of(model)
    support.check_config(config)
    try:
        built = empty_model(config, torch.float32, attention_for(config))
    except Exception as error:  # models raise all sorts over values that make no sense
        raise no_such_model(model, error) from error
    map_tensors(model, built)
    known, kinds = tokenizer_of(model), model.kinds
    loaded = LoadedModel(built, known, name, packed=model.packed)
    return Outline(loaded, sum(kinds.values()), tuple(kinds), gguf=model, has_mtp=bool(model.nextn))
