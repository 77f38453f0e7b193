"""Initial models for training a draft model (pruned, random or given), and how they are saved."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outpace.core.progress import silent
from outpace.errors import ConfigError, UnsupportedModel, VocabularyMismatch, reason_of
from outpace.heads.base import MAX_SIZE
from outpace.heads.folder import saving
from outpace.targets.cpu.kernels import Kernels
from outpace.targets.hf.gguf.load import read_dequantized
from outpace.targets.hf.kinds import sees_images
from outpace.targets.hf.loading.load import load, load_plain
from outpace.targets.hf.loading.loaded import LoadedModel, check_same_vocabulary
from outpace.targets.hf.loading.source import locate, names_gguf
from outpace.targets.hf.partial.layers import with_layers

DRAFT_MODEL = "draft_model"
PRUNED, RANDOM = "pruned", "random"
"""Starts that are not a folder: layers of the target, and random weights."""

UNFINISHED = ".saving-"
"""How the names of folders begin in which a model is written, before its files take their place."""

NAMES = {
    "hidden_size": "hidden_size",
    "inner_size": "intermediate_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""Our sizes, as configurations of transformers call them."""


@dataclass(frozen=True, kw_only=True)
class DraftModelSizes:
    """The sizes of a small model; 0 where they are the target's."""

    depths: int = 5
    """Tokens after the root by which its drafts are simulated while it learns."""
    layers: int = 0
    """Its layers; 0: a quarter of the target's, or all that a given model has."""
    hidden_size: int = 0
    inner_size: int = 0
    """Width of the feed-forward parts."""
    heads: int = 0
    """Attention heads."""
    groups: int = 0
    """Heads of keys and values."""
    head_dim: int = 0
    """Width of an attention head."""

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size > MAX_SIZE:
                raise ValueError(f"{name} is {size}, and {MAX_SIZE} is the most")


@dataclass(frozen=True)
class StartModel:
    """A small model, or a larger one of which it gets some layers, and the tokenizer that is kept
    with it."""

    model: nn.Module
    tokenizer: Any
    file: str | None = None
    """The GGUF file that the model is in, if it is in one: what learns is read from there, since
    weights in blocks cannot, and no others are dequantised."""

    def to_trainable(self, kept: Sequence[int] | None, device: torch.device) -> StartModel:
        """Returns the model with these layers, in their order, in float32 and ready to learn.
        kept: None for all."""
        if self.file is not None:
            model = read_dequantized(self.file, kept)
        else:
            model = self.model if kept is None else prune_layers(self.model, kept)
        return StartModel(_to_learn(model.float().to(device)), self.tokenizer)

    def save(self, out: Path) -> None:
        """Writes a Hugging Face folder. Each file is replaced at once. Raises ``OSError`` where
        they cannot be written."""
        model: Any = self.model
        out.mkdir(parents=True, exist_ok=True)
        with saving(out), tempfile.TemporaryDirectory(dir=out, prefix=UNFINISHED) as unfinished:
            model.save_pretrained(unfinished)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(unfinished)
            # A tokenizer's further chat templates have a folder of their own.
            files = sorted(file for file in Path(unfinished).rglob("*") if file.is_file())
            for file in files:  # safetensors lets nobody else read what it writes
                shutil.copymode(Path(unfinished) / "config.json", file)
            for file in files:
                place = out / file.relative_to(unfinished)
                place.parent.mkdir(exist_ok=True)
                file.replace(place)


def remove_unfinished(out: Path) -> None:
    """Removes what a process that was killed while it saved a model has left in its folder."""
    for folder in out.glob(f"{UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def load_start_model(target: LoadedModel, start: str, sizes: DraftModelSizes) -> StartModel:
    """Returns the model that a small one begins as, with all its layers. start: a folder, `PRUNED`
    or `RANDOM`. For `PRUNED` it may be the target itself, which must not change:
    `StartModel.to_trainable` makes a model of some of its layers.

    Raises ``ConfigError`` for sizes that do not fit, and `VocabularyMismatch` for a folder whose
    model has other tokens, or only some of them.
    """
    if start == PRUNED:
        return _of_target(target, sizes)
    if start == RANDOM:
        return StartModel(_random(target, sizes), target.tokenizer)
    return _given(target, start, sizes)


def check_layers(wanted: int, count: int, name: str) -> None:
    """Raises ``ConfigError`` where more layers are to be kept than a model has."""
    if wanted > count:
        raise ConfigError(f"layers is {wanted}, and {name} has {count}: ask for fewer.")


def _of_target(target: LoadedModel, sizes: DraftModelSizes) -> StartModel:
    """The target with transformers' layers: ours may stand in the places of some, which is why a
    folder is read once more. Which layers are kept can be measured with ours as well."""
    check_of_target(target, sizes)
    if target.cpu_kernels is None:
        return StartModel(target.model, target.tokenizer)
    if names_gguf(target.name):
        if target.lora is not None:
            raise ConfigError(
                "layers of a GGUF file are read without the adapter that lora names: begin with a "
                "folder, or with --start random."
            )
        return StartModel(target.model, target.tokenizer, file=locate(target.name))
    read = load_plain(
        target.name,
        dtype=torch.float32,
        device="cpu",
        trust_remote_code=not type(target.model).__module__.startswith("transformers."),
        lora=target.lora,
        progress=silent,
    )
    return StartModel(read.model, target.tokenizer)


def check_of_target(target: LoadedModel, sizes: DraftModelSizes) -> None:
    """Raises ``ConfigError`` for sizes that no model of some of the target's layers has, and for a
    target that reads images as well."""
    if sees_images(target.model.config):
        raise ConfigError(
            f"{target.name} reads images, and layers are taken of language models: begin with a "
            "folder, or with --start random."
        )
    _check_unset(sizes, "has the target's own width", *NAMES)
    check_layers(sizes.layers, int(target.config.num_hidden_layers), target.name)


def _given(target: LoadedModel, folder: str, sizes: DraftModelSizes) -> StartModel:
    _check_unset(sizes, "comes from a folder, which says its widths", *NAMES)
    file = locate(folder) if names_gguf(folder) else None
    # What learns is read from the file once more; until then its blocks are only multiplied.
    kernels: Kernels = "off" if file is None else "auto"
    found = load(folder, device=target.device, dtype=torch.float32, cpu_kernels=kernels)
    check_same_vocabulary(target, found)
    tokens = int(found.config.vocab_size)
    if tokens < target.vocabulary:
        raise VocabularyMismatch(
            f"{folder} has {tokens} tokens and {target.name} can generate {target.vocabulary}: "
            "give it embeddings for the others first (transformers' resize_token_embeddings)."
        )
    check_layers(sizes.layers, int(found.config.num_hidden_layers), folder)
    return StartModel(found.model, found.tokenizer or target.tokenizer, file)


def prune_layers(whole: Any, kept: Sequence[int]) -> nn.Module:
    """Returns a model of these layers of another one, in their order; ``ConfigError`` where they
    are no model of their own."""
    model = _made(_config_with(whole, kept), "these layers", type(whole))
    model.load_state_dict(_weights_with(whole, kept, model))
    return model


def check_prunable(whole: Any, kept: Sequence[int]) -> None:
    """Raises ``ConfigError`` where these layers are no model of their own; reads no weights."""
    with torch.device("meta"):
        model = _made(_config_with(whole, kept), "some layers", type(whole), tried=False)
    _weights_with(whole, kept, model)


def _config_with(whole: Any, kept: Sequence[int]) -> Any:
    config = whole.config
    return with_layers(config, int(config.get_text_config().num_hidden_layers), kept)


def _weights_with(whole: Any, kept: Sequence[int], model: nn.Module) -> dict[str, Tensor]:
    """The weights of these layers and of what is outside of layers, by their names in ``model``;
    ``ConfigError`` where it has others."""
    prefix = _name_of_layers(whole, int(whole.config.get_text_config().num_hidden_layers))
    places = {f"{prefix}.{old}.": f"{prefix}.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, value in whole.state_dict().items():
        place = next((old for old in places if name.startswith(old)), None)
        if place is not None:
            weights[places[place] + name[len(place) :]] = value
        elif not name.startswith(f"{prefix}."):
            weights[name] = value
    own = {name: value.shape for name, value in model.state_dict().items()}
    if own != {name: value.shape for name, value in weights.items()}:
        raise ConfigError(
            f"layers {', '.join(map(str, kept))} of a {type(whole).__name__} are no model of their "
            "own, because what is in a layer follows from its number: begin with a folder, or with "
            "--start random."
        )
    return weights


def _random(target: LoadedModel, sizes: DraftModelSizes) -> nn.Module:
    config = copy.deepcopy(target.config)
    count = int(config.num_hidden_layers)
    wanted = sizes.layers or max(1, count // 4)
    known = {ours: theirs for ours, theirs in NAMES.items() if getattr(sizes, ours)}
    for ours, theirs in known.items():
        if not hasattr(config, theirs):
            raise ConfigError(
                f"a {config.model_type} model has no {theirs}, so {ours} cannot be set."
            )
        setattr(config, theirs, getattr(sizes, ours))
    if "heads" in known and "groups" not in known and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = sizes.heads
    if {"hidden_size", "heads"} & set(known) and "head_dim" not in known:
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"hidden_size {config.hidden_size} cannot be shared evenly by "
                f"{config.num_attention_heads} heads: set both, or head_dim as well."
            )
        if getattr(config, "head_dim", None) is not None:
            config.head_dim = config.hidden_size // config.num_attention_heads
    kinds = torch.linspace(0, count - 1, min(wanted, count)).round().int().tolist()
    return _made(with_layers(config, count, kinds, wanted), "these sizes")


def _made(config: Any, what: str, kind: Any = None, *, tried: bool = True) -> nn.Module:
    """Returns a model with random weights. kind: its class; unset: transformers' own for it. tried:
    whether it makes a pass."""
    try:
        config.validate()  # as transformers does before it saves a model
        make: Any = AutoModelForCausalLM.from_config if kind is None else kind._from_config
        model: nn.Module = make(config)
        if tried:
            with torch.inference_mode():
                model(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception as error:  # configurations raise all sorts
        raise ConfigError(
            f"no {config.model_type} model of {what} can be made: {reason_of(error)}"
        ) from error
    return model


def _name_of_layers(model: nn.Module, count: int) -> str:
    lists = [
        found
        for found, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(lists) != 1:
        raise UnsupportedModel(
            f"the layers of a {type(model).__name__} are not in one list, so that none can be left "
            "out: begin with a folder, without layers, or with --start random."
        )
    return str(lists[0])


def _check_unset(sizes: DraftModelSizes, why: str, *names: str) -> None:
    given = [name for name in names if getattr(sizes, name)]
    if given:
        raise ConfigError(f"{given[0]} cannot be set for a start that {why}: leave it out.")


def _to_learn(model: nn.Module) -> nn.Module:
    # Not train(): without dropout a run that goes on later is the same bit by bit.
    return model.eval().requires_grad_(True)
