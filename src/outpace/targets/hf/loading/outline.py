"""A model as far as it is known without its weights: what loading finds before it reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.initialization import no_init_weights

from outpace.errors import ModelLoadError, OutpaceError, UnsupportedModel, reason_of
from outpace.targets.hf import support
from outpace.targets.hf.generating import generation
from outpace.targets.hf.gguf.architecture import config_of
from outpace.targets.hf.gguf.building import empty_model
from outpace.targets.hf.gguf.file import GGUFModel, read_model
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.gguf.load import read_gguf_tokenizer
from outpace.targets.hf.gguf.names import arrangement_of
from outpace.targets.hf.loading.load import pick_device
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.loading.nextn import in_first_module
from outpace.targets.hf.loading.quantized import check_readable, method_of
from outpace.targets.hf.loading.reading import (
    attention_for,
    class_for,
    read_config,
    read_tokenizer_of,
)
from outpace.targets.hf.loading.source import (
    INDEXES,
    WEIGHTS,
    WHOLE,
    check_path,
    downloaded,
    locate,
)


@dataclass(frozen=True, eq=False)
class Outline:
    """What the files of a model say of it."""

    loaded: Loaded
    """The model, with weights that have no storage, and its tokenizer."""
    nbytes: int
    """Bytes of its weights on the disk."""
    dtypes: tuple[str, ...]
    """The types of its numbers or the kinds of its blocks."""
    quantized: str | None = None
    """How others have quantised its weights."""
    gguf: GGUFModel | None = None
    foresees: bool = False
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
    layers = int(getattr(config.get_text_config(), "num_hidden_layers", 0))
    return Outline(
        Loaded(_empty(config, name, trust), known, name),
        sum(file.stat().st_size for file in files),
        dtypes,
        method_of(config),
        foresees=any(in_first_module(each, layers) for each in names),
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
    built = _made(lambda: empty_model(config, torch.float32, attention_for(config)), name)
    arrangement_of(model, built)
    known, kinds = read_gguf_tokenizer(source), model.kinds
    loaded = Loaded(built, known, name, packed=model.packed)
    return Outline(loaded, sum(kinds.values()), tuple(kinds), gguf=model)


def _empty(config: Any, name: str, trust: bool) -> nn.Module:
    def make() -> nn.Module:
        with torch.device("meta"), no_init_weights():
            return class_for(config).from_config(config, trust_remote_code=trust)  # type: ignore[no-any-return]

    return _made(make, name)


def _made(make: Any, name: str) -> nn.Module:
    try:
        built: nn.Module = make()
    except OutpaceError:
        raise
    except Exception as error:  # models raise all sorts over configurations that make no sense
        raise UnsupportedModel(
            f"no model can be made as the files of {name!r} describe it ({reason_of(error)}): "
            "download it again, or use another one."
        ) from error
    return built


# -- files with weights ----------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold a model's weights; ``ModelLoadError`` where some are missing."""
    if (folder / WHOLE).is_file():  # which transformers looks for first
        return [folder / WHOLE]
    for index in INDEXES:
        if (folder / index).is_file():
            return _indexed(folder, folder / index)
    for pattern in WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = sorted(folder / name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f"cannot read {index} ({reason_of(error, named=True)}): download or save the model "
            "again."
        ) from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of {len(files)} files with weights ({missing[0]} is "
            "one): download them into it."
        )
    return files


def headers(files: list[Path]) -> tuple[list[str], tuple[str, ...]]:
    """Returns the names of the weights in files, and the types of their numbers; of pickled files
    nothing is known. Raises ``ModelLoadError`` for a file that is damaged or cut short."""
    found = [entry for file in files if file.suffix == ".safetensors" for entry in _header(file)]
    names = [name for name, _ in found]
    return names, tuple(sorted({dtype for _, dtype in found}))


def _header(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                yield name, str(opened.get_slice(name).get_dtype())
    except Exception as error:  # of the library, which has one of its own
        raise ModelLoadError(
            f"the weights in {str(file)!r} are damaged or cut short ({reason_of(error)}): download "
            "or save the model again."
        ) from error
