"""Hidden states of a target in blocks of text, kept on disk, with its likeliest next tokens.

Reading the text costs a pass of the target, which is most of what training a small head costs. The
second pass through a text, and another drafter that learns from the same one, need not pay for it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.errors import ConfigError, ModelLoadError
from outpace.files import PART, replacing
from outpace.heads.classifiers import ModelSignature
from outpace.heads.folder import saving

HEADER, PROBE, SUFFIX = "states.json", "probe_states.safetensors", ".states"
CACHE_DTYPE = torch.bfloat16
"""The type that states are kept in: it takes half the room, and holds the very large values that
some layers have, which float16 does not."""
HOUR = 3600
"""Seconds after which nobody is still writing a file, which takes moments."""
MAX_DISTANCE = 0.02
"""The largest distance of two probe states of one model, as a share of their length: rounding in
another order moves them by far less, other weights or other precision by more."""


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """What is kept of one block of T tokens."""

    states: Tensor  # [T, H], the layers that were asked for side by side
    top_tokens: Tensor  # [T, TOP], the likeliest next tokens, the likeliest first
    top_chances: Tensor  # [T, TOP]


class HiddenStateCache:
    """A folder with a file for each block of text, named by its tokens.

    A file holds each layer by itself, so that drafters which read other layers can share it: what
    is missing is read once and added. A file that is damaged counts as missing. Several processes
    may use one folder. What a killed one has left of a file counts as one of them, and is removed
    an hour later: until then another process might be writing it.
    """

    def __init__(self, folder: Path, model_signature: ModelSignature, most_bytes: int) -> None:
        """model_signature: the target. most_bytes: nothing is added to a folder that has as many.

        Raises ``ConfigError`` for a folder that belongs to another target, or to the same one in
        another precision.
        """
        self._folder, self._most_bytes = folder, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HEADER).exists():
            self._check(model_signature)
        else:
            self._begin(model_signature)
        self._bytes = _swept(folder)

    @property
    def full(self) -> bool:
        """Whether nothing more is added."""
        return self._bytes >= self._most_bytes

    def find(self, tokens: Tensor, layers: Sequence[int], top: int) -> CachedBlock | None:
        """Returns what is kept of a block ``[T]``; None unless it is all there.

        layers: whose states, by the teacher's numbers. top: how many of the likeliest tokens.
        """
        found = self._load(tokens)
        names = [_name(layer) for layer in layers]
        if any(name not in found for name in names) or (top and "top_tokens" not in found):
            return None
        if top and found["top_tokens"].shape[-1] < top:
            return None
        return _kept(found, layers, top)

    def keep(
        self,
        tokens: Tensor,
        layers: Sequence[int],
        states: Mapping[int, Tensor],
        top_tokens: Tensor,
        top_chances: Tensor,
    ) -> CachedBlock:
        """Adds to a block ``[T]`` the states ``[T, H]`` of some layers, and the likeliest tokens
        ``[T, TOP]``, if there are any. Returns what `find` returns for it and ``layers``, of which
        one may come twice, rounded in the same way even if nothing more is added."""
        new = {_name(layer): value.to("cpu", CACHE_DTYPE) for layer, value in states.items()}
        top = top_tokens.shape[-1]
        if top:
            new["top_tokens"] = top_tokens.to("cpu", torch.int32)
            new["top_chances"] = top_chances.to("cpu", torch.float32)
        if not self.full:
            self._save(tokens, {**self._load(tokens), **new})
        return _kept(new, layers, top)

    def _load(self, tokens: Tensor) -> dict[str, Tensor]:
        try:
            return load_file(self._path(tokens))
        except (FileNotFoundError, SafetensorError):
            return {}

    def _save(self, tokens: Tensor, values: Mapping[str, Tensor]) -> None:
        path = self._path(tokens)
        before = path.stat().st_size if path.exists() else 0
        _write(path, values)
        self._bytes += path.stat().st_size - before

    def _path(self, tokens: Tensor) -> Path:
        digest = hashlib.sha256(tokens.to("cpu", torch.int64).numpy().tobytes())
        return self._folder / (digest.hexdigest()[:32] + SUFFIX)

    def _begin(self, model_signature: ModelSignature) -> None:
        _write(self._folder / PROBE, {"probe_states": model_signature.probe_states.cpu()})
        header = json.dumps({"target": model_signature.shape.name}) + "\n"
        with saving(self._folder / HEADER), replacing(self._folder / HEADER) as part:
            part.write_text(header, encoding="utf-8")

    def _check(self, model_signature: ModelSignature) -> None:
        try:
            name = json.loads((self._folder / HEADER).read_text(encoding="utf-8"))["target"]
            then = load_file(self._folder / PROBE)["probe_states"].double()
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelLoadError(
                f"{self._folder} keeps no hidden states that can be read: name another folder, or "
                "delete it to begin anew."
            ) from error
        now = model_signature.probe_states.double().cpu()
        if then.shape != now.shape or float((then - now).norm()) > MAX_DISTANCE * float(now.norm()):
            raise ConfigError(
                f"{self._folder} keeps hidden states of {name}, which are others than those of "
                f"{model_signature.shape.name} as it is loaded here: name another folder."
            )


def _swept(folder: Path) -> int:
    """The bytes of all blocks and unfinished files, after old ones of these were removed."""
    found = 0
    for file in folder.glob("*"):
        with suppress(OSError):  # an unfinished one of another process may be finished by now
            about = file.stat()
            if file.suffix == PART and time.time() - about.st_mtime > HOUR:
                file.unlink()
            elif file.suffix in (SUFFIX, PART):
                found += about.st_size
    return found


def _write(path: Path, values: Mapping[str, Tensor]) -> None:
    """Writes a file of tensors; ``OSError`` where it cannot be written."""
    with saving(path), replacing(path) as part:
        save_file({name: value.contiguous() for name, value in values.items()}, part)


def _name(layer: int) -> str:
    return f"states.{layer}"


def _kept(values: Mapping[str, Tensor], layers: Sequence[int], top: int) -> CachedBlock:
    states = [values[_name(layer)] for layer in layers]
    length = len(next(iter(values.values()))) if values else 0
    none = torch.empty(length, 0)
    likeliest = values["top_tokens"][:, :top].long() if top else none.long()
    chances = values["top_chances"][:, :top] if top else none
    return CachedBlock(torch.cat(states, -1) if states else none, likeliest, chances)
