"""The multi-token-prediction modules that some checkpoints bring along after their last layer.

transformers leaves them out when it loads a model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from outpace.errors import ModelLoadError, OutpaceError, UnsupportedModel, reason_of
from outpace.targets.hf.device_map import onload_weights
from outpace.targets.hf.gguf.families import FAMILIES
from outpace.targets.hf.gguf.file import GGUFModel, read_model
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.gguf.nextn import read_gguf_modules
from outpace.targets.hf.loading.files import headers, weight_files
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.nextn_files import TRAIN, StoredWeights
from outpace.targets.hf.loading.nextn_names import (
    STATES_FIRST,
    ModuleNames,
    has_mtp_weights,
    modules_in,
    place_of,
)
from outpace.targets.hf.loading.quantized import NOTES, is_scale
from outpace.targets.hf.loading.reading import without_loading_bars
from outpace.targets.hf.loading.source import downloaded, locate, names_gguf
from outpace.targets.hf.nextn import NORMS, NextN, NextNLayers, last_norm

FULL, SLIDING = "full_attention", "sliding_attention"


def has_mtp_modules(loaded: LoadedModel) -> bool:
    """Returns whether the folder or file of a target holds modules, by the names of its weights."""
    if loaded.num_mtp_modules or names_gguf(loaded.name):
        return bool(loaded.num_mtp_modules)
    source = _source_of(loaded)
    if source is None or is_gguf(source):
        return False
    try:
        names, _ = headers(weight_files(source))
    except ModelLoadError:  # the model is loaded: what has become of its folder is no matter
        return False
    return has_mtp_weights(names, loaded.model.config)


def read_modules(loaded: LoadedModel, named: str | None = None) -> list[NextN]:
    """Returns the modules in the folder or file of a target.

    named: another folder or file of the same model, or a file with modules alone. Raises
    ``UnsupportedModel`` where there are none, or some that cannot be drafted with, and
    ``ModelLoadError`` where weights are missing or damaged.
    """
    source = _source_of(loaded) if named is None else Path(locate(named))
    if source is None:
        raise UnsupportedModel(
            "a model that comes from no folder brings no multi-token-prediction module: name a "
            "folder of 'outpace train mtp' as 'model'."
        )
    if is_gguf(source):
        return _in_file(loaded, source)
    files = StoredWeights(source)
    model: Any = loaded.model
    found = modules_in((name for name in files.where if not is_scale(name)), model.config)
    if not found:
        raise UnsupportedModel(
            f"{source.name} brings no multi-token-prediction module that is known here: {TRAIN}."
        )
    try:
        return [_Reading(loaded, files, each, number).module() for number, each in enumerate(found)]
    except OutpaceError:
        raise
    except Exception as error:  # transformers raises all sorts over the files of others
        raise UnsupportedModel(
            f"the multi-token-prediction module in {source.name} cannot be read "
            f"({reason_of(error)[:200]}): {TRAIN}."
        ) from error


def _source_of(loaded: LoadedModel) -> Path | None:
    """The folder or file that a target was loaded from; None where there is none here."""
    own = str(getattr(loaded.model.config, "name_or_path", "") or "")
    if names_gguf(loaded.name):
        return Path(locate(loaded.name))
    if not own or Path(own).is_dir():
        return Path(own) if own else None
    try:
        found = downloaded(own)
    except HFValidationError:  # a folder that is gone
        return None
    return found if found is not None and found.is_dir() else None


def check_file(source: Path, config: Any) -> GGUFModel:
    """Returns what a file with modules says; raises ``UnsupportedModel`` where it holds none, or
    some for another target than one of this configuration."""
    model = read_model(source)
    kind = FAMILIES[model.architecture].type_of(model) if model.architecture in FAMILIES else None
    width = model.number("embedding_length")
    if not model.nextn:
        raise UnsupportedModel(
            f"{source.name} brings no multi-token-prediction module: {TRAIN}, or name a file that "
            "has some."
        )
    if kind != config.model_type or width != config.hidden_size:
        raise UnsupportedModel(
            f"the multi-token-prediction module in {source.name} is one of a {model.architecture} "
            f"of width {width}, and this target is a {config.model_type} of width "
            f"{config.hidden_size}: name a file for this target."
        )
    return model


def _in_file(loaded: LoadedModel, source: Path) -> list[NextN]:
    model = check_file(source, loaded.config)
    packed = loaded.device.type == "cpu" and loaded.dtype == torch.float32
    return read_gguf_modules(model, loaded.dtype, loaded.device, packed)


class _Reading:
    """Makes one module of the weights in a folder."""

    def __init__(
        self, loaded: LoadedModel, files: StoredWeights, parts: ModuleNames, number: int
    ) -> None:
        self._loaded, self._files, self._parts, self._number = loaded, files, parts, number
        self._what = f"the multi-token-prediction module in {files.folder.name}"
        self._model: Any = loaded.model

    def module(self) -> NextN:
        parts = self._parts
        lacking = [part for part in ("enorm", "hnorm", "eh_proj", "layer 0") if part not in parts]
        if lacking or "unknown" in parts:
            odd = next(iter(parts["unknown"].values()), "") if "unknown" in parts else ""
            why = f"holds {odd!r}" if odd else f"has nothing that is called {lacking[0]!r}"
            raise UnsupportedModel(f"{self._what} {why}, and is not known here: {TRAIN}.")
        notes = [name for own in parts.values() for name in own.values() if NOTES.search(name)]
        if notes:
            raise UnsupportedModel(
                f"{self._what} is quantised ({notes[0]!r} belongs to one of its weights), and is "
                f"read in plain numbers and in FP8 only: {TRAIN}."
            )
        decoder = self._decoder()
        norm = last_norm(decoder)
        if "post_norm" not in parts:  # Ernie 4.5 has the target's own last norm there
            own = last_norm(self._model.get_decoder())
            with torch.no_grad(), onload_weights(own):
                norm.load_state_dict(own.state_dict())
        made = NextN(
            self._norm(norm, "enorm"),
            self._norm(norm, "hnorm"),
            self._joined(),
            NextNLayers(decoder),
            self._is_states_first(),
            self._table("embed", nn.Embedding),
            self._table("head", nn.Linear),
        )
        return made

    def _is_states_first(self) -> bool:
        if self._files.of_library:  # which has MiMo's name for a matrix of the usual order
            return False
        return any(f".{STATES_FIRST}." in name for name in self._parts["eh_proj"].values())

    # -- its layers ----------------------------------------------------------------------------

    def _decoder(self) -> nn.Module:
        parts = self._parts
        config = self._config()
        known: Any = AutoModelForCausalLM._model_mapping
        whole = type(config) in known
        kind = known[type(config)] if whole else type(self._model.get_decoder())
        inside = "model." if whole else ""
        names = {
            f"{inside}layers.{part[6:]}.{name}": theirs
            for part, own in parts.items()
            if part.startswith("layer ")
            for name, theirs in own.items()
        }
        weights = {ours: self._files.read(theirs) for ours, theirs in names.items()}
        if "post_norm" in parts:
            norm = next(n for n in NORMS if hasattr(self._model.get_decoder(), n))
            weights |= {
                f"{inside}{norm}.{name}": self._files.read(theirs)
                for name, theirs in parts["post_norm"].items()
            }
        made, report = self._made(kind, config, weights)
        self._check(report, inside)
        decoder: nn.Module = made.get_decoder() if whole else made
        return decoder.to(self._loaded.device)

    def _made(self, kind: Any, config: Any, weights: dict[str, Tensor]) -> tuple[Any, Any]:
        eager = self._model.config.get_text_config()._attn_implementation == "eager"
        with without_loading_bars(), _without_report():
            made, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=self._loaded.dtype,
                attn_implementation="eager" if eager else None,
                output_loading_info=True,
            )
        return made, report

    def _check(self, report: Any, inside: str) -> None:
        odd = sorted(each for each in report["unexpected_keys"] if "rotary_emb" not in each)
        if odd:
            raise UnsupportedModel(
                f"{self._what} holds weights that transformers' class has no place for "
                f"({odd[0]!r} is one): {TRAIN}."
            )
        missing = [
            name
            for name in sorted(report["missing_keys"])
            if f"{inside}layers." in name
            or (name.removeprefix(inside).partition(".")[0] in NORMS and "post_norm" in self._parts)
        ]
        if missing:
            raise ModelLoadError(
                f"{self._what} lacks {len(missing)} of its weights ({missing[0]!r} is one): "
                "download the model again."
            )

    def _config(self) -> Any:
        sparse = any("experts." in name for name in self._layer_names())
        return module_config(self._model.config, self._number, sparse)

    def _layer_names(self) -> Sequence[str]:
        parts = self._parts
        return [name for part in parts if part.startswith("layer ") for name in parts[part]]

    # -- what stands around them ---------------------------------------------------------------

    def _norm(self, like: nn.Module, part: str) -> nn.Module:
        made = copy.deepcopy(like)
        self._fill(made, part)
        return made

    def _joined(self) -> nn.Module:
        size = int(self._loaded.config.hidden_size)
        bias = "bias" in self._parts["eh_proj"]
        made = nn.Linear(2 * size, size, bias=bias, device=self._loaded.device)
        return self._fill(made.to(self._loaded.dtype), "eh_proj")

    def _table(self, part: str, kind: type[nn.Module]) -> nn.Module | None:
        """A matrix of a row for each token, where a module has one of its own."""
        name = self._parts.get(part, {}).get("weight")
        if name is None or any(self._files.same(name, other) for other in self._tables(part)):
            return None
        config = self._loaded.config
        rows, size = int(config.vocab_size), int(config.hidden_size)
        made: nn.Module
        if kind is nn.Embedding:
            made = nn.Embedding(rows, size)
        else:
            made = nn.Linear(size, rows, bias=False)
        return self._fill(made.to(self._loaded.device, self._loaded.dtype), part)

    def _tables(self, part: str) -> list[str]:
        """The names of the target's own matrices of a kind: where the two are one, either."""
        endings = ("lm_head.weight",) if part == "head" else ()
        if part == "embed" or self._loaded.config.tie_word_embeddings:
            endings = (*endings, "embed_tokens.weight", "word_embeddings.weight")
        own = self._parts[part].values()
        return [
            name
            for name in self._files.where
            if name.endswith(endings)
            and name not in own
            and place_of(name, int(self._loaded.config.num_hidden_layers)) is None
        ]

    def _fill(self, made: nn.Module, part: str) -> nn.Module:
        weights = {name: self._files.read(own) for name, own in self._parts[part].items()}
        wanted = {name: tuple(weight.shape) for name, weight in made.state_dict().items()}
        given = {name: tuple(weight.shape) for name, weight in weights.items()}
        if given != wanted:
            raise ModelLoadError(
                f"{self._what} has the shapes {given} in its part {part!r}, and its config.json "
                f"calls for {wanted}: download the model again."
            )
        made.load_state_dict(weights)
        return made


def decoder_of(known: Mapping[str, Any]) -> nn.Module:
    """Returns a text model of new weights, by its configuration; ``ValueError`` where that makes no
    sense."""
    try:
        config = AutoConfig.for_model(**known)
        make: Any = AutoModelForCausalLM
        model = make.from_config(config, dtype=torch.float32)
    except Exception as error:  # models raise all sorts over configurations that make no sense
        raise ValueError(f"family describes no text model: {reason_of(error)}") from error
    return model.get_decoder()  # type: ignore[no-any-return]


NOT_OF_LAYERS = (
    "num_nextn_predict_layers", "num_mtp_layers", "quantization_config", "per_layer_config",
    "model_type", "transformers_version", "architectures", "dtype",
)  # fmt: skip
"""Entries of a configuration that a module's has not."""


def module_config(config: Any, number: int, sparse: bool) -> Any:
    """Returns the configuration of a text model that has the layers of one module.

    sparse: whether they have experts.
    """
    text = config.get_text_config(decoder=True)
    known: Mapping[str, Any] = text.to_dict()
    several = getattr(text, "mtp_layers_block_type", None)
    kinds = several or [_kind_of_attention(text, number)]
    changes: dict[str, Any] = {
        "num_hidden_layers": len(kinds),
        "vocab_size": 2,  # embeddings and head are the target's
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        # Which layers have experts: each family says it in its own way.
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_end_index": 0,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
    }
    if getattr(text, "layer_types", None) is not None:
        changes["layer_types"] = list(kinds)
    if getattr(text, "mlp_layer_types", None) is not None:
        changes["mlp_layer_types"] = ["sparse" if sparse else "dense"]
    own = {theirs: ours for theirs, ours in (getattr(text, "attribute_map", None) or {}).items()}
    named = {own.get(name, name): value for name, value in changes.items()}
    kept = {name: value for name, value in known.items() if name not in NOT_OF_LAYERS}
    return type(text)(**{**kept, **{n: v for n, v in named.items() if n in known}})


def _kind_of_attention(text: Any, number: int) -> str:
    """The type of the layer of a module, where a configuration has types."""
    types = list(getattr(text, "layer_types", None) or [FULL])
    named = getattr(text, "mtp_layer_types", None)
    if named:
        return str(named[min(number, len(named) - 1)])
    if text.model_type == "mimo_v2_flash":
        return SLIDING  # so its own code, and vLLM's
    return FULL if FULL in types else types[-1]


@contextmanager
def _without_report() -> Iterator[None]:
    """Silences what transformers says of embeddings that are missing: they are the target's."""
    said: Any = logging
    before = said.get_verbosity()
    said.set_verbosity_error()
    try:
        yield
    finally:
        said.set_verbosity(before)
