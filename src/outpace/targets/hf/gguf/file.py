"""A model in one GGUF file, or in several parts of one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.values import is_integer, shown
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.cpu.weights.blocks import KINDS, dequantizes
from outpace.targets.hf.gguf.header import Header, StoredTensor, begins_as_gguf, read_header

PLAIN = ("F32", "F16", "BF16")
"""The kinds of numbers that are in no blocks."""

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
"""How the parts of a split model are called."""

LAYER = re.compile(r"blk\.(\d{1,9})\.")
"""How the tensors of a layer begin."""

NO_MODEL = {
    "adapter": "a LoRA adapter",
    "mmproj": "the image or audio projector of another model",
    "imatrix": "an importance matrix",
}
"""Files that `general.type` calls something else than a model."""


SAME = {
    "attention.layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon",
}
"""Values that files hold under either of two names."""


@dataclass(frozen=True, eq=False)
class GGUFModel:
    """What the files of one model say."""

    path: Path
    """As it was named."""
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]
    nextn: tuple[dict[str, StoredTensor], ...] = ()
    """The tensors of each of its multi-token-prediction modules, as those of a layer 0."""

    @property
    def architecture(self) -> str:
        """The model's family, as llama.cpp calls it."""
        return str(self.values["general.architecture"])

    def family_value(self, name: str) -> Any:
        """Returns a value of the model's own family, such as "block_count", None if it has none."""
        return self.values.get(f"{self.architecture}.{name}")

    def number(self, name: str) -> Any:
        """Returns one number of the model's family, None if the file has none.

        A list of the same number for each layer counts as that number; layers without key heads do
        not count. Raises ``ModelLoadError``
        for what is no number, ``UnsupportedModel`` for another one in each layer.
        """
        value = self.family_value(name)
        if value is None and name in SAME:
            value = self.family_value(SAME[name])
        if isinstance(value, np.ndarray):
            if name == "attention.head_count_kv":
                value = value[value != 0]
            if len(value) == 0 or not (value == value[0]).all():
                raise self.unread(f"has another {name} in each layer, which is not read")
            value = value[0].item()
        if value is None or is_number(value):
            return value
        raise ModelLoadError(
            f"{self.path} says that its {name} is {shown(value)}, not a number: download it again."
        )

    def unread(self, what: str) -> UnsupportedModel:
        """Returns the error for a model that is not read. what: the rest of a sentence about its
        file, which says why."""
        return UnsupportedModel(f"{self.path} {what}: use the model's Hugging Face folder instead.")

    @property
    def alone(self) -> bool:
        """Whether it holds modules, and no layers of the model."""
        return bool(self.nextn) and not any(LAYER.match(name) for name in self.tensors)

    @property
    def head_size(self) -> int:
        """Numbers of a head of attention."""
        heads = self.number("attention.head_count")
        size = self.number("attention.key_length") or self.number("embedding_length") // heads
        return int(size)

    @property
    def packed(self) -> bool:
        """Whether any of its weights can stay in blocks."""
        return any(tensor.kind in KINDS for tensor in self.tensors.values())

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds of its weights with the bytes of each, the largest share first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.raw.nbytes
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def printable_reason(error: BaseException) -> str:
    """Returns what an error of another library says, in one short line: it may quote the file."""
    words = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {''.join(c if c.isprintable() else '?' for c in words)}"


def is_number(value: Any) -> bool:
    """Returns whether a value of a file is one number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def part_names(name: str) -> list[str]:
    """Returns the names of all parts of a model of which one is named; of a whole one, its own."""
    named = PART.fullmatch(name)
    if named is None or not 1 <= int(named["number"]) <= int(named["count"]):
        return [name]
    count = int(named["count"])
    return [f"{named['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a model: one, or all parts of which one is named.

    Raises ``ModelLoadError`` where parts are missing.
    """
    names = part_names(path.name)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if len(names) > 1 and missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        are = "is" if len(missing) == 1 else "are"
        raise ModelLoadError(
            f"{path} is part of a model in {len(names)} files, and {', '.join(missing[:3])}{more} "
            f"{are} not next to it: download all of them into one folder."
        )
    return [path.parent / name for name in names]


def files_in(folder: Path) -> list[Path]:
    """Returns the models in the GGUF files of a folder, each by the first of its parts that are
    there. Projectors, which lie next to the models that they belong to, are left out."""
    found: dict[tuple[str, ...], Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        if not file.name.startswith("mmproj"):
            found.setdefault(tuple(part_names(file.name)), file)
    return list(found.values())


def check_files(path: Path) -> None:
    """Raises ``ModelLoadError`` where a look at the disk shows that a file cannot be read."""
    for part in parts_of(path):
        if not begins_as_gguf(part):
            read_header(part)  # says what is wrong


def read_model(path: Path) -> GGUFModel:
    """Returns what the files of a model say, checked: it is a language model, and of kinds of
    weights that are read here.

    Raises ``ModelLoadError`` or ``UnsupportedModel``.
    """
    headers = [read_header(part) for part in parts_of(path)]
    _check_parts(path, headers)
    values = {**headers[-1].values, **headers[0].values}
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        twice = tensors.keys() & header.tensors
        if twice:
            raise ModelLoadError(
                f"two parts of {path} hold the same weights ({shown(min(twice))}): download it "
                "again."
            )
        tensors |= header.tensors
    _check_kind_of_file(path, values)
    model = GGUFModel(path, values, tensors)
    _check_tensors(model)
    return _apart(model)


def _apart(model: GGUFModel) -> GGUFModel:
    """Returns a model with the layers after its last one, which guess further tokens, put apart."""
    more, count = model.number("nextn_predict_layers"), model.number("block_count")
    if not (is_integer(more) and is_integer(count) and 0 < more < count):
        return model
    last = count - more
    own: dict[str, StoredTensor] = {}
    after: list[dict[str, StoredTensor]] = [{} for _ in range(more)]
    for name, tensor in model.tensors.items():
        match = LAYER.match(name)
        if match is None or int(match[1]) < last:
            own[name] = tensor
        elif int(match[1]) < count:
            renamed = f"blk.0.{name[match.end() :]}"
            after[int(match[1]) - last][renamed] = replace(tensor, name=renamed)
    values = {**model.values, f"{model.architecture}.block_count": last}
    for name, value in model.values.items():
        if isinstance(value, np.ndarray) and len(value) == count and name[:9] != "tokenizer":
            values[name] = value[:last]
    return GGUFModel(model.path, values, own, tuple(filter(None, after)))


def of_layers(model: GGUFModel, kept: Sequence[int]) -> GGUFModel:
    """Returns a model with the tensors of these layers, counted from 0 in their order, and with
    those that belong to no layer. What it says of itself stays as it is."""
    numbers = {old: new for new, old in enumerate(kept)}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in model.tensors.items():
        match = LAYER.match(name)
        if match is None:
            tensors[name] = tensor
        elif int(match[1]) in numbers:
            renamed = f"blk.{numbers[int(match[1])]}.{name[match.end() :]}"
            tensors[renamed] = replace(tensor, name=renamed)
    return replace(model, tensors=tensors)


def _check_parts(path: Path, headers: Sequence[Header]) -> None:
    """Raises ``ModelLoadError`` unless files that say which part of a model they are say what their
    names do, and hold all its weights together."""
    for place, header in enumerate(headers):
        count, number = _said(header, "split.count"), _said(header, "split.no")
        if len(headers) == 1 and count is not None and count > 1:
            raise ModelLoadError(
                f"{path} is one of {count} parts of a model, and has another name than parts have, "
                "or all of them were joined as they are: name the parts again as "
                f"NAME-00001-of-{count:05}.gguf and so on, in one folder, or join them with "
                "llama.cpp's llama-gguf-split --merge."
            )
        by_name = f"part {place + 1} of {len(headers)} by its name"
        if count not in (None, 0, len(headers)):  # 0: of several that were put together again
            raise _of_another_model(header.path, by_name, f"one of {count} parts")
        if len(headers) > 1 and number not in (None, place):
            raise _of_another_model(header.path, by_name, f"part {number + 1}")
    held = sum(len(header.tensors) for header in headers)
    for header in headers:
        total = _said(header, "split.tensors.count")
        if total not in (None, held) and len(headers) > 1:
            raise ModelLoadError(
                f"the parts of {path} hold {held} weights together, and {header.path.name} says "
                f"that there are {total}: download all parts of one model into one folder."
            )


def _said(header: Header, name: str) -> Any:
    """Returns a whole number that a file says, None if it says none."""
    found = header.values.get(name)
    if found is None or (is_integer(found) and found >= 0):
        return found
    raise ModelLoadError(
        f"{header.path} says that its {name} is {shown(found)}, which counts nothing: download it "
        "again."
    )


def _of_another_model(path: Path, by_name: str, inside: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is {by_name}, and says itself that it is {inside} of its model: download all "
        "parts of one model into one folder, and leave them their names."
    )


def _check_kind_of_file(path: Path, values: dict[str, Any]) -> None:
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelLoadError(
            f"{path} does not say which architecture its model has (general.architecture): "
            "download it again."
        )
    kind = values.get("general.type", "model")
    what = NO_MODEL.get(kind) if isinstance(kind, str) else None
    what = NO_MODEL["mmproj"] if architecture == "clip" else what
    if what is not None:
        raise UnsupportedModel(
            f"{path} holds {what}, not a language model: name the GGUF file of the model itself."
        )


def _check_tensors(model: GGUFModel) -> None:
    if not model.tensors:
        raise ModelLoadError(
            f"{model.path} holds no weights, only a vocabulary: name the GGUF file of a model."
        )
    for tensor in model.tensors.values():
        if tensor.kind not in PLAIN and not dequantizes(tensor.kind):
            raise UnsupportedModel(
                f"{model.path} holds {shown(tensor.name)} in numbers or blocks of kind "
                f"{tensor.kind}, which the installed gguf library does not dequantise: use a "
                "Q4_K_M or Q8_0 file of the model, or a newer gguf library."
            )
