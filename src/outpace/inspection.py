"""Inspection of a file or folder: its kind, its target, and how it is used or why it cannot be.

The functions that load things say so, as far as they come before weights are read: what is said
here of a file is what loading it finds.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.errors import ModelLoadError, OutpaceError, UnsupportedModel, VocabularyMismatch
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import check_fits_target, find_head_kind, load_head_unchecked
from outpace.heads.classifiers import KIND as CLASSIFIER
from outpace.heads.classifiers import load_classifier
from outpace.heads.folder import CONFIG, HeadFolder
from outpace.heads.gguf import is_head_gguf
from outpace.heads.registry import format_of
from outpace.methods.lookup.datastore import DESCRIPTION, Datastore, fingerprint_of
from outpace.targets.hf.gguf.file import read_model
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.kinds import is_encoder_decoder, sees_images
from outpace.targets.hf.loading.files import headers, weight_files
from outpace.targets.hf.loading.loaded import check_same_vocabulary
from outpace.targets.hf.loading.lora import check_fits, read_adapter
from outpace.targets.hf.loading.nextn import check_file
from outpace.targets.hf.loading.nextn_files import LIBRARY
from outpace.targets.hf.loading.outline import Outline, outline_model
from outpace.targets.hf.loading.source import ADAPTER, names_gguf

EAGLE = "fc.weight"
"""The weight by which an EAGLE head is distinguished from a language model of one layer."""


@dataclass(frozen=True)
class Inspection:
    """What a path leads to."""

    path: str
    kind: str
    """"model", "head", "adapter", "classifier" or "datastore"."""
    what: str
    """The same in words."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    """What to type to use it."""
    target: str | None = None
    """The model that it was held against."""
    why_not: str | None = None
    """Why it cannot be used, at all or with that target."""

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON has it."""
        names = ("path", "kind", "what", "facts", "commands", "target", "why_not")
        found = {name: getattr(self, name) for name in names}
        return {**found, "facts": dict(self.facts), "commands": list(self.commands)}


def inspect(path: str, target: str | None = None, trust_remote_code: bool = False) -> Inspection:
    """Returns what a path leads to, and whether it goes with a target, if one is named.

    Raises ``OutpaceError`` for what is nothing that can be read, or damaged, and for a target that
    cannot be loaded.
    """
    place, about = Path(path), _about(path)
    against = None if target is None else outline_model(target, trust_remote_code)
    if (place / DESCRIPTION).is_file():
        return _datastore(path, target, against)
    if (place / ADAPTER).is_file() and not _holds_model(place):
        return _adapter(path, target, against)
    if CLASSIFIER in about:
        return _classifier(path, str(about[CLASSIFIER]), target, against)
    if is_head_gguf(path):
        return _head(path, target, against)
    if about.get(LIBRARY) == "mtp":
        return _module_of_library(path, about, target, against)
    form = format_of(about)
    if form is not None and (form.name != "eagle" or _is_eagle(place)):
        return _head(path, target, against)
    return _model(path, target, against, trust_remote_code)


def _about(path: str) -> Mapping[str, Any]:
    """The configuration in a folder, empty where none can be read: whoever loads it says why."""
    with suppress(ModelLoadError):
        return HeadFolder(Path(path)).read_config()
    return {}


def _holds_model(place: Path) -> bool:
    return (place / CONFIG).is_file() and any(
        not file.name.startswith("adapter_model") for file in weight_files(place)
    )


def _is_eagle(place: Path) -> bool:
    """Whether a folder holds a head of EAGLE, whose configuration is that of a language model."""
    names, _ = headers(weight_files(place))
    return EAGLE in names


def _size(place: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    files = [place] if place.is_file() else place.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _command(*words: str) -> str:
    return shlex.join(["outpace", "generate", *words])


def _with_target(target: str | None) -> list[str]:
    return ["-m", "TARGET" if target is None else target]


# -- heads and classifiers -------------------------------------------------------------------------


def _head(path: str, target: str | None, against: Outline | None) -> Inspection:
    head, form = load_head_unchecked(path)
    shape = head.target
    facts = {
        "format": form.name,
        "bytes": _size(Path(path)),
        "dtype": str(head.dtype).removeprefix("torch."),
        "target": shape.name or None,
        "hidden_size": shape.hidden_size or None,
        "vocabulary": shape.vocab_size or None,
        "layers": shape.layers or None,
        "reads": list(head.hidden_layers),
        "draft_vocabulary": head.vocabulary,
        "depths": head.config.depths,
    }
    method = ["--method", head.kind] if find_head_kind(path) is None else []
    found = Inspection(
        path,
        "head",
        f"a trained head of the kind {head.kind!r}, in the format {form.name!r}",
        facts,
        (_command(*_with_target(target), *method, "--draft", path),),
        target,
    )
    return found if against is None else _judged(found, lambda: _fit(head, against, path))


def _modules_alone(path: str, target: str | None, against: Outline | None) -> Inspection | None:
    """A GGUF file that holds the multi-token-prediction modules of a model, and not the model."""
    source = Path(path)
    if not is_gguf(source) or not (model := read_model(source)).alone:
        return None
    facts = {
        "bytes": _size(source),
        "blocks": list(model.kinds),
        "hidden_size": model.number("embedding_length"),
        "modules": len(model.nextn),
    }
    what = (
        "a multi-token-prediction module without its model, in a GGUF file (architecture "
        f"{model.architecture})"
    )
    words = (*_with_target(target), "--method", "mtp", "--draft", path)
    found = Inspection(path, "head", what, facts, (_command(*words),), target)
    if against is None:
        return found

    def check() -> None:
        check_file(source, against.loaded.config)

    return _judged(found, check)


def _part(about: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    """Returns an object in a configuration, empty if it is not there."""
    found = about.get(name) or {}
    if not isinstance(found, Mapping):
        raise ModelLoadError(f"config.json in {path!r}: {name} must be an object, not {found!r}.")
    return found


def _module_of_library(
    path: str, about: Mapping[str, Any], target: str | None, against: Outline | None
) -> Inspection:
    """A multi-token-prediction module in a folder of the library `speculators`."""
    source = Path(path)
    headers(weight_files(source))  # raises for files that are missing or damaged
    layer = _part(about, "transformer_layer_config", path)
    verifier = _part(_part(about, "speculators_config", path), "verifier", path)
    facts = {
        "bytes": _size(source),
        "target": verifier.get("name_or_path"),
        "hidden_size": layer.get("hidden_size"),
        "family": layer.get("model_type"),
    }
    what = "a multi-token-prediction module of the library speculators, without its model"
    words = (*_with_target(target), "--method", "mtp", "--draft", path)
    found = Inspection(path, "head", what, facts, (_command(*words),), target)
    if against is None:
        return found
    config = against.loaded.config

    def check() -> None:
        if (layer.get("model_type"), layer.get("hidden_size")) != (
            config.model_type,
            config.hidden_size,
        ):
            raise UnsupportedModel(
                f"the module in {path!r} is one of a {layer.get('model_type')} of width "
                f"{layer.get('hidden_size')}, and this target is a {config.model_type} of width "
                f"{config.hidden_size}: name a folder for this target."
            )

    return _judged(found, check)


def _fit(head: Head, against: Outline, path: str) -> None:
    name = against.loaded.name
    check_fits_target(head, TargetShape.of(against.loaded.config, name), f"the head in {path!r}")


def _judged(found: Inspection, check: Callable[[], None]) -> Inspection:
    """What was found, with why it does not go with the target, if it does not."""
    try:
        check()
    except OutpaceError as error:
        return replace(found, why_not=str(error), commands=())
    return found


def _classifier(path: str, kind: str, target: str | None, against: Outline | None) -> Inspection:
    network = load_classifier(path, kind)  # its weights are a few kilobytes
    shape = network.shape
    facts = {
        "bytes": _size(Path(path)),
        "made_for": shape.name or None,
        "hidden_size": shape.hidden_size,
        "vocabulary": shape.vocab_size,
        "layers": shape.layers,
    }
    place = "verify" if kind == "judge" else "length"
    entry = {"model": "DRAFT_MODEL", place: {"name": kind, "head": path}}
    words = (*_with_target(target), "--speculative-config", json.dumps(entry))
    what = f"a classifier of the kind {kind!r}"
    found = Inspection(path, "classifier", what, facts, (_command(*words),), target)
    if against is None:
        return found
    if kind != "judge":  # it reads the states of a draft model
        return replace(found, target=None)
    here = TargetShape.of(against.loaded.config, against.loaded.name)
    return _judged(found, lambda: network.model_signature.check_shape(here, f"the {kind}"))


# -- datastores and adapters -----------------------------------------------------------------------


def _datastore(path: str, target: str | None, against: Outline | None) -> Inspection:
    datastore = Datastore.open(path)
    about = datastore.description
    facts = {
        "bytes": datastore.nbytes,
        "texts": about.texts,
        "tokens": about.tokens,
        "vocabulary": about.vocabulary,
        "tokenizer": about.tokenizer or None,
    }
    method = "retrieval" if datastore.has_texts else "suffix"
    config = json.dumps({"method": method, "datastore": path})
    words = (*_with_target(target), "--speculative-config", config)
    held = "texts" if datastore.has_texts else "a table of n-grams, without its texts,"
    what = f"a datastore of {held} to look tokens up in"
    found = Inspection(path, "datastore", what, facts, (_command(*words),), target)
    if against is None:
        return found
    known = against.loaded.tokenizer

    both = known is not None and about.fingerprint is not None
    fingerprint = fingerprint_of(known) if both else None
    size = int(against.loaded.config.vocab_size)
    return _judged(found, lambda: datastore.check(fingerprint, size))


def _adapter(path: str, target: str | None, against: Outline | None) -> Inspection:
    found = Inspection(path, "adapter", "an adapter", {"bytes": _size(Path(path))}, target=target)
    try:
        adapter = read_adapter(Path(path))
    except UnsupportedModel as error:
        return replace(found, why_not=str(error))
    about = adapter.about
    names = sorted({name.rpartition(".")[2] for name in adapter.layers})
    facts = {
        **found.facts,
        "base": adapter.base,
        "rank": about.get("r"),
        "alpha": about.get("lora_alpha"),
        "changes": names,
        "layers_changed": len(adapter.layers),
        "replaces": sorted(adapter.others),
    }
    what = "a LoRA adapter" + (" with lengths of its own (DoRA)" if about.get("use_dora") else "")
    base = target or adapter.base or "TARGET"
    found = replace(found, what=what, facts=facts, commands=(_command("-m", base, "--lora", path),))
    if against is None:
        return found
    return _judged(found, lambda: check_fits(adapter, against.loaded.model))


# -- models ----------------------------------------------------------------------------------------


def _model(path: str, target: str | None, against: Outline | None, trust: bool) -> Inspection:
    what = "a GGUF file" if names_gguf(path) else "a folder with a model"
    bare = Inspection(path, "model", what, {}, target=target)
    try:
        found = outline_model(path, trust)
    except UnsupportedModel as error:
        with suppress(UnsupportedModel):  # which is the one that is caught
            if (alone := _modules_alone(path, target, against)) is not None:
                return alone
        return replace(bare, facts={"bytes": _size(Path(path))}, why_not=str(error))
    commands = tuple(_model_commands(path, target, found))
    known = replace(bare, what=_kind_of(found), facts=dict(_model_facts(found)), commands=commands)
    if against is None:
        return known
    try:
        check_same_vocabulary(against.loaded, found.loaded)
    except VocabularyMismatch as error:
        if None in (against.loaded.tokenizer, found.loaded.tokenizer):
            return replace(known, why_not=str(error), commands=())
        return replace(known, facts={**known.facts, "tokens": OTHER_TOKENS})
    return replace(known, facts={**known.facts, "tokens": "the target's"})


OTHER_TOKENS = "other ones than the target's, so that drafts are translated"


def _kind_of(found: Outline) -> str:
    model: Any = found.loaded.model
    kind = "a language model"
    if is_encoder_decoder(model):
        kind = "an encoder-decoder"
    elif sees_images(model.config):
        kind = "a vision-language model"
    kind += f" of type {model.config.model_type!r}"
    if found.gguf is not None:
        kind += f", in a GGUF file (architecture {found.gguf.architecture})"
    return kind


def _model_facts(found: Outline) -> Iterator[tuple[str, Any]]:
    loaded = found.loaded
    config = loaded.config
    yield "bytes", found.nbytes
    if found.gguf is not None:
        yield "blocks", {kind: nbytes / found.nbytes for kind, nbytes in found.gguf.kinds.items()}
    else:
        yield "dtype", ", ".join(found.dtypes) or None
    if found.quantized is not None:
        yield "quantized", found.quantized
    yield "parameters", sum(weight.numel() for weight in loaded.model.parameters())
    yield "layers", getattr(config, "num_hidden_layers", None)
    yield "hidden_size", getattr(config, "hidden_size", None)
    yield "vocabulary", getattr(config, "vocab_size", None)
    yield "context", loaded.max_length
    yield "tokenizer", loaded.tokenizer is not None
    yield "multi_token_prediction", found.has_mtp


def _model_commands(path: str, target: str | None, found: Outline) -> Iterator[str]:
    if target is not None:
        yield _command("-m", target, "--draft", path)
        return
    yield _command("-m", path)
    if found.has_mtp:
        yield _command("-m", path, "--method", "mtp")
    yield _command("-m", "TARGET", "--draft", path)
