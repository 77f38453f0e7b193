"""A LoRA adapter of peft, merged into the weights of a model as it is loaded.

A weight W ``[N, K]`` becomes W + s B A, with A ``[r, K]``, B ``[N, r]`` and s = alpha / r, or
alpha / sqrt(r) for a rank-stabilised one; a DoRA adapter also gives each of its rows a new length.
Other weights of the adapter take the place of the model's own (``modules_to_save``, biases).

Hu et al. 2021 (arXiv 2106.09685), Kalajdzievski 2023 (rsLoRA, 2312.03732), Liu et al. 2024 (DoRA,
2402.09353).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.core.values import shown
from outpace.errors import ModelLoadError, OutpaceError, UnsupportedModel, reason_of
from outpace.targets.hf.loading.fetched import check_fetched
from outpace.targets.hf.loading.source import ADAPTER, MERGED, locate_adapter

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

PREFIX = "base_model.model."
"""How peft's names of weights begin, before the model's own names."""

WRAPPED = (".base_layer", ".modules_to_save.default", ".modules_to_save")
"""What peft puts between the name of a module and that of its weight."""

PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.(?P<end>weight|bias))?"
)
"""A matrix of an adapter."""

ALPHA, RANK = 8, 8
"""What peft takes where a configuration does not say them."""

PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways in which an adapter may have begun that leave the model's own weights as they are."""

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that an adapter is merged into."""

UNREAD = {
    "layer_replication": "repeats layers of its model",
    "alora_invocation_tokens": "changes a text from some token on only",
    "use_qalora": "has its inputs pooled",
    "use_bdlora": "is cut into blocks",
    "trainable_token_indices": "changes single tokens",
    "kasa_config": "scales each rank (KaSA)",
    "monteclora_config": "draws its matrices at random",
    "arrow_config": "chooses among several adapters",
}
"""Entries of adapters that cannot be merged, and what they do."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """What a folder with an adapter holds."""

    path: Path
    about: Mapping[str, Any]
    """Its configuration."""
    weights: Mapping[str, Tensor]
    """By peft's names."""

    @property
    def base(self) -> str | None:
        """The model that it was made for, as far as it says."""
        found = self.about.get("base_model_name_or_path")
        return found if isinstance(found, str) and found else None

    @cached_property
    def layers(self) -> dict[str, dict[str, Tensor]]:
        """The matrices of each layer that it changes, by the layer's name in the model."""
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, weight in self.weights.items():
            if match := PART.fullmatch(name.removeprefix(PREFIX)):
                part = match["part"] + (".bias" if match["end"] == "bias" else "")
                found[match["module"]][part] = weight
        return dict(found)

    @cached_property
    def others(self) -> dict[str, Tensor]:
        """The weights that take the place of the model's own, by their names there."""
        found = {}
        for name, weight in self.weights.items():
            plain = name.removeprefix(PREFIX)
            if PART.fullmatch(plain) is None:
                module, dot, end = plain.rpartition(".")
                for wrapped in WRAPPED:
                    module = module.removesuffix(wrapped)
                found[module + dot + end] = weight
        return found

    @property
    def changed(self) -> set[str]:
        """The names of the weights that it changes, but for biases."""
        return {f"{name}.weight" for name in self.layers} | self.others.keys()

    def scale(self, layer: str, rank: int) -> float:
        """Returns what the product of a layer's two matrices is multiplied by."""
        alpha = self._by_pattern("alpha_pattern", layer, self.about.get("lora_alpha", ALPHA))
        return float(alpha) / (math.sqrt(rank) if self.about.get("use_rslora") else rank)

    def rank(self, layer: str) -> int:
        """Returns the rank that the configuration says."""
        return int(self._by_pattern("rank_pattern", layer, self.about.get("r", RANK)))

    def _by_pattern(self, entry: str, layer: str, usual: Any) -> Any:
        """An entry that may be another one for layers whose names end with a pattern."""
        patterns = self.about.get(entry) or {}
        found = (
            value for end, value in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", layer)
        )
        return next(found, usual)

    def damaged(self, why: str) -> ModelLoadError:
        """Returns the error for an adapter whose files make no sense."""
        return ModelLoadError(f"the adapter in {self.path} is damaged ({why}): copy it again.")

    def unfit(self, why: str) -> UnsupportedModel:
        """Returns the error for an adapter that does not go with a model."""
        made = "another model" if self.base is None else f"the model {shown(self.base)}"
        return UnsupportedModel(
            f"the adapter in {self.path} was made for {made}, and does not fit this one ({why}): "
            "use it with its own model."
        )


def digest_of(folder: Path) -> str:
    """Returns a short text that no other adapter has: names of their folders repeat."""
    found = hashlib.sha256()
    for path in sorted(folder / name for name in (ADAPTER, *WEIGHTS)):
        if path.is_file():
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def read_adapter(path: Path) -> Adapter:
    """Returns the adapter in a folder, whose weights are mapped and not read yet, unless they
    are pickled.

    path: of the folder, or a hub name. Raises ``ModelLoadError`` where there is none,
    ``UnsupportedModel`` for one that cannot be merged.
    """
    path = locate_adapter(str(path))
    about = _config(path)
    kind = about.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModel(
            f"{path} holds an adapter of the kind {shown(kind)}, and only LoRA adapters are read: "
            f"{MERGED}."
        )
    for entry, does in UNREAD.items():
        if about.get(entry):
            raise UnsupportedModel(f"the adapter in {path} {does} ({entry}): {MERGED}.")
    start = about.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise UnsupportedModel(
            f"the adapter in {path} began with {shown(start)}, which changes the weights of its "
            "model too: save it as a plain one (peft's "
            "path_initial_model_for_weight_conversion)."
        )
    adapter = Adapter(path, about, _weights(path))
    try:
        _check(adapter)
    except OutpaceError:
        raise
    except (TypeError, ValueError, AttributeError, re.error, OverflowError) as error:
        raise adapter.damaged(reason_of(error)) from error
    return adapter


def _config(path: Path) -> dict[str, Any]:
    if path.is_file():
        raise ModelLoadError(
            f"{path} is a file, and a LoRA adapter is a folder with {ADAPTER}, as peft writes it: "
            "name the folder."
        )
    if not path.is_dir():
        raise ModelLoadError(
            f"there is no folder {str(path)!r} with a LoRA adapter, and none of this name can be "
            "downloaded: check the spelling."
        )
    try:
        about = json.loads((path / ADAPTER).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path} has no {ADAPTER}: name a folder with a LoRA adapter, as peft writes it."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"cannot read {path / ADAPTER} ({reason_of(error)}): copy the adapter again."
        ) from error
    if not isinstance(about, dict):
        raise ModelLoadError(f"{path / ADAPTER} describes no adapter: copy it again.")
    return about


def _weights(path: Path) -> dict[str, Tensor]:
    found = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if found is None:
        raise ModelLoadError(f"{path} has no {' or '.join(WEIGHTS)}: copy the adapter again.")
    check_fetched([found])
    try:
        if found.suffix == ".safetensors":
            return load_file(found)
        weights = torch.load(found, map_location="cpu", weights_only=True)
        if not all(isinstance(each, Tensor) for each in weights.values()):
            raise ValueError("not a table of tensors")
    except Exception as error:  # torch and safetensors raise all sorts over a damaged file
        raise ModelLoadError(
            f"the weights in {found} are damaged or cut short ({reason_of(error)}): copy the "
            "adapter again."
        ) from error
    return dict(weights)


def _check(adapter: Adapter) -> None:
    """Raises unless each layer has the matrices of its rank."""
    if not adapter.weights:
        raise adapter.damaged("it has no weights")
    for name, parts in adapter.layers.items():
        down, up = _pair(parts)
        if down is None or up is None:
            raise adapter.damaged(f"it has one of two matrices for {shown(name)}")
        rank = adapter.rank(name)
        if down.dim() != 2 or up.dim() != 2 or not len(down) == up.shape[1] == rank:
            raise adapter.damaged(
                f"its matrices for {shown(name)} have the shapes {tuple(down.shape)} and "
                f"{tuple(up.shape)}, and its rank is {rank}"
            )
        if not math.isfinite(adapter.scale(name, rank)):
            raise adapter.damaged(f"its alpha for {shown(name)} is not finite")
        if "lora_embedding_A" in parts and "lora_magnitude_vector" in parts:
            raise UnsupportedModel(
                f"the adapter in {adapter.path} changes the lengths of embeddings (DoRA), which is "
                f"not read: {MERGED}."
            )


def _pair(parts: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """A ``[r, K]`` and B ``[N, r]``; of an embedding ``[r, V]`` and ``[H, r]``."""
    kind = "lora_embedding" if "lora_embedding_A" in parts else "lora"
    return parts.get(f"{kind}_A"), parts.get(f"{kind}_B")


# -- merging ---------------------------------------------------------------------------------------


@torch.no_grad()
def merge(adapter: Adapter, model: nn.Module) -> None:
    """Merges an adapter into a model whose layers are plain, in the dtype of its weights.

    A head that shares the embedding's weights keeps those that it had, as in peft. Raises
    ``UnsupportedModel`` where the adapter does not fit, ``ModelLoadError`` for numbers that are not
    finite.
    """
    for layer, name, weight in _merged(adapter, model):
        if weight.numel() and not all(bool(end.isfinite()) for end in weight.aminmax()):
            raise adapter.damaged(f"it makes numbers of {shown(name)} that are not finite")
        setattr(layer, name, nn.Parameter(weight, requires_grad=False))
    _note_untied(model)


def check_fits(adapter: Adapter, model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where an adapter does not fit a model, which need not have
    storage for its weights."""
    for name, parts in adapter.layers.items():
        _check_layer(adapter, model, name, parts)
    for name, weight in adapter.others.items():
        _place(adapter, model, name, weight)


def _merged(adapter: Adapter, model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields each new weight with its module and its name there."""
    check_fits(adapter, model)
    for name, weight in adapter.others.items():  # before what is added to them
        layer, end = _place(adapter, model, name, weight)
        yield layer, end, weight.to(getattr(layer, end))
    for name, parts in adapter.layers.items():
        layer = model.get_submodule(name)
        down, up = _pair(parts)
        assert down is not None
        assert up is not None
        scale = adapter.scale(name, len(down))
        own: Any = layer.weight
        wide = torch.promote_types(own.dtype, torch.float32)
        turned = not isinstance(layer, nn.Linear)  # an embedding and GPT-2's kind of layer
        weight = own.to(wide).t() if turned else own.to(wide)
        new = torch.addmm(weight, up.to(weight), down.to(weight), alpha=scale)  # [N, K]
        if (lengths := parts.get("lora_magnitude_vector")) is not None:
            new *= (lengths.to(new).flatten() / new.norm(dim=1))[:, None]
        yield layer, "weight", (new.t() if turned else new).to(own.dtype).contiguous()
        if (more := parts.get("lora_B.bias")) is not None:
            bias: Any = layer.bias
            before = torch.zeros_like(more).to(new) if bias is None else bias.to(wide)
            yield layer, "bias", (before + scale * more.to(before)).to(own.dtype)


def _check_layer(
    adapter: Adapter, model: nn.Module, name: str, parts: Mapping[str, Tensor]
) -> None:
    try:
        layer: Any = model.get_submodule(name)
    except AttributeError as error:
        raise adapter.unfit(f"it changes {shown(name)}, which is not there") from error
    embeds = "lora_embedding_A" in parts
    kinds = (nn.Embedding,) if embeds else (nn.Linear, Conv1D)
    if not isinstance(layer, kinds):
        raise adapter.unfit(
            f"it changes {shown(name)}, a {type(layer).__name__}, and linear layers and embeddings "
            "can be changed"
        )
    if layer.weight.dtype not in PLAIN:
        raise UnsupportedModel(
            f"the adapter in {adapter.path} changes weights that are quantised, and it is merged "
            "into plain numbers: name the model as it was before it was quantised."
        )
    down, up = _pair(parts)
    assert down is not None
    assert up is not None
    shape = (len(up), down.shape[1])
    wanted = tuple(layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1])
    if shape != wanted:
        raise adapter.unfit(f"{shown(name)} is of the shape {wanted}, not {shape}")


def _place(adapter: Adapter, model: nn.Module, name: str, weight: Tensor) -> tuple[nn.Module, str]:
    """The module that a weight takes the place in, and its name there."""
    path, _, end = name.rpartition(".")
    try:
        layer = model.get_submodule(path)
        own = layer.get_parameter(end)
    except AttributeError as error:
        raise adapter.unfit(f"it holds {shown(name)}, which is not there") from error
    if own.shape != weight.shape:
        raise adapter.unfit(
            f"{shown(name)} is of the shape {tuple(own.shape)}, not {tuple(weight.shape)}"
        )
    return layer, end


def _note_untied(model: nn.Module) -> None:
    """Says in the configuration where embedding and head have become two weights."""
    whole: Any = model
    table, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    # Not ``.weight``: of layers in blocks that would be dequantised for a look.
    if head is not None and head._parameters.get("weight") is not table._parameters.get("weight"):
        for config in (whole.config, whole.config.get_text_config()):
            config.tie_word_embeddings = False
